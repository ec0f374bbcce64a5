"""Which prompts a run has. Apart from the model itself, so that reading a configuration stays quick."""

from dataclasses import dataclass
from typing import ClassVar, Self

from fedfrozen_app.errors import UserError

_CHOICES = {
    "prompts": ("both", "global", "local", "none"),
    "modalities": ("both", "text", "vision"),
    "fusion": ("cross", "sum", "concat"),
    "fusion_query": ("global", "local"),
}


@dataclass(frozen=True)
class PromptDesign:
    """Which prompts there are and how they meet. `prompts="none"` reads the template alone: zero-shot."""

    prompts: str = "both"
    modalities: str = "both"
    fusion: str = "cross"
    fusion_query: str = "global"
    text_tokens: int = 16
    vision_tokens: int = 16
    depth: int = 1
    heads: int = 8
    template: str = "a photo of a {}."
    within: ClassVar[str] = ""  # where a configuration has these settings, for sentences about them

    def checked_design(self) -> Self:
        for key, choices in _CHOICES.items():
            if (value := getattr(self, key)) not in choices:
                raise UserError(f"{self.within}{key}={value} is unknown: choose one of {', '.join(choices)}.")
        for key in ("text_tokens", "vision_tokens", "depth", "heads"):
            if (value := getattr(self, key)) < 1:
                raise UserError(f"{self.within}{key}={value} must be at least 1.")
        if "{}" not in self.template:
            raise UserError(
                f"{self.within}template={self.template!r} has no {{}} for the class name: add it."
            )
        return self

    @property
    def levels(self) -> tuple[str, ...]:
        return {"both": ("global", "local"), "none": ()}.get(self.prompts, (self.prompts,))

    @property
    def towers(self) -> tuple[str, ...]:
        """The towers that have prompts of their own."""
        if not self.levels:
            return ()
        return ("text", "vision") if self.modalities == "both" else (self.modalities,)

    @property
    def fused(self) -> bool:
        return self.prompts == "both" and self.fusion == "cross"
