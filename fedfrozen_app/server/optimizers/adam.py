"""FedAdam: Reddi et al., arXiv 2003.00295.    v ← β₂ v + (1 − β₂) Δ̄²"""

from torch import Tensor

from fedfrozen_app.server.optimizers.adaptive import Corrected


class Adam(Corrected):
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.settings.beta2 * v + (1 - self.settings.beta2) * square
