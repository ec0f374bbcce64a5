"""Roles of parameters. Strategies, plans and policies use roles, never parameter names."""

from dataclasses import dataclass

KINDS = (
    "embedding",
    "query",
    "key",
    "value",
    "output",
    "mlp",
    "norm",
    "head",
    "prompt",
    "fusion",
)
KERNEL = ("query", "key")  # with their biases: they determine the attention weights


@dataclass(frozen=True)
class Role:
    """The function of a parameter in the model.

    layer: the block's number from 0, None outside the blocks.
    tower: "vision" or "text" in a model with two towers, else "".
    feeds_attention: true for a norm whose output is the input of the query and key projections.
    adapter: true for an adapter, which has the kind and layer of the projection that it adapts.
    """

    kind: str
    layer: int | None = None
    tower: str = ""
    feeds_attention: bool = False
    adapter: bool = False

    @property
    def word(self) -> str:
        """The word for this parameter in a site's policy: "adapter", or its kind."""
        return "adapter" if self.adapter else self.kind


def is_embedding(role: Role) -> bool:
    """Whether this is an embedding, or the norm after it: outside the layers, the first layer's input."""
    return role.kind == "embedding" or (role.kind == "norm" and role.layer is None and role.feeds_attention)
