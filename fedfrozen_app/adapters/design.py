"""The prompt design of a run. Separate from the model, so that reading a configuration is fast."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from fedfrozen_app.config import check_settings, setting
from fedfrozen_app.core.errors import UserError

AT_LEAST_1 = "must be at least 1."
TEMPLATE = "How class names are read where no text prompt is learned"


class Design:
    """Base of the settings of models with prompts."""

    within: ClassVar[str] = ""  # prefix of these settings in the configuration, for messages

    if TYPE_CHECKING:  # fields of some designs, constants of others

        @property
        def prompts(self) -> str: ...
        @property
        def modalities(self) -> str: ...
        @property
        def fusion(self) -> str: ...
        @property
        def template(self) -> str: ...

    def checked_design(self) -> Self:
        check_settings(self, self.within)
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
        """The towers that have their own prompts."""
        if not self.levels:
            return ()
        return ("text", "vision") if self.modalities == "both" else (self.modalities,)

    @property
    def fused(self) -> bool:
        return self.prompts == "both" and self.fusion == "cross"


@dataclass(frozen=True)
class PromptDesign(Design):
    """The prompts and their fusion. `prompts="none"` uses only the template: zero-shot."""

    prompts: str = setting(
        "both",
        "`global` is PromptFL, `local` each client alone, `none` zero-shot (with `num_rounds=0`)",
        choices=("both", "global", "local", "none"),
    )
    modalities: str = setting(
        "both", "The encoders that are given prompts", choices=("both", "text", "vision")
    )
    fusion: str = setting(
        "cross", "How a client's two prompts meet; `cross` is attention", choices=("cross", "sum", "concat")
    )
    fusion_query: str = setting("global", "Which prompt asks in that attention", choices=("global", "local"))
    text_tokens: int = setting(16, "Prompt vectors before the class name", least=1, instead=AT_LEAST_1)
    vision_tokens: int = setting(16, "Prompt tokens added to the patches", least=1, instead=AT_LEAST_1)
    depth: int = setting(
        1, "Blocks of the vision encoder that get prompt tokens of their own", least=1, instead=AT_LEAST_1
    )
    heads: int = setting(8, "Heads of the cross-attention", least=1, instead=AT_LEAST_1)
    template: str = setting("a photo of a {}.", TEMPLATE)


@dataclass(frozen=True)
class TextDesign(Design):
    """Contexts before the class name, without prompts in the vision encoder, as in most methods."""

    prompts: ClassVar[str] = "both"
    modalities: ClassVar[str] = "text"
    fusion: ClassVar[str] = "concat"
    fusion_query: ClassVar[str] = "global"
    vision_tokens: ClassVar[int] = 1
    depth: ClassVar[int] = 1
    heads: ClassVar[int] = 1

    text_tokens: int = setting(16, "Prompt vectors before the class name", least=1, instead=AT_LEAST_1)
    template: str = setting("a photo of a {}.", TEMPLATE)
