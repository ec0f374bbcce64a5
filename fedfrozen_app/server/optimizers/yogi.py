"""FedYogi: Reddi et al., arXiv 2003.00295.    v ← v − (1 − β₂) Δ̄² sign(v − Δ̄²)"""

from torch import Tensor

from fedfrozen_app.server.optimizers.adaptive import Corrected


class Yogi(Corrected):
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.settings.beta2) * square * (v - square).sign()
