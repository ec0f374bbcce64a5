"""Server side: one file a strategy, stating only its difference from the base."""

from strategies.base import PlannedFedAvg
from strategies.fedavg import FedAvg
from strategies.fedfrozen import FedFrozen
from strategies.fedprox import FedProx
from strategies.local import Local
from strategies.pfeddc import PFedDC
from strategies.safl import SAFL

STRATEGIES: dict[str, type[PlannedFedAvg]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedfrozen": FedFrozen,
    "local": Local,
    "safl": SAFL,
    "pfeddc": PFedDC,
}
