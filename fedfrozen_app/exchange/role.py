"""What a parameter is for. Strategies, plans and policies speak of roles, never of parameter names."""

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
KERNEL = ("query", "key")  # with their biases: what fixes the attention weights


@dataclass(frozen=True)
class Role:
    """What a parameter is for.

    layer: the block's number from 0, None outside the blocks.
    tower: "vision" or "text" in a model with two towers, else "".
    feeds_attention: true for a norm whose output is what the query and key projections read.
    adapter: true for an adapter, which has the kind and layer of the projection that it adapts.
    """

    kind: str
    layer: int | None = None
    tower: str = ""
    feeds_attention: bool = False
    adapter: bool = False

    @property
    def word(self) -> str:
        """What a site's policy calls what travels: adapters by that name, and all else by its kind."""
        return "adapter" if self.adapter else self.kind


def is_embedding(role: Role) -> bool:
    """Embeddings, and the norm that closes them: outside the layers, read by the first one's attention."""
    return role.kind == "embedding" or (role.kind == "norm" and role.layer is None and role.feeds_attention)
