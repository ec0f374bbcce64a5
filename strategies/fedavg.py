"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

w_{t+1} = Σᵢ (nᵢ/n) wᵢ        every parameter trains, travels and is averaged
"""

from fedfrozen_app.server.base import PlannedFedAvg


class FedAvg(PlannedFedAvg):
    """The plan of the base class: everything, every round."""
