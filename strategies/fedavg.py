"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

w_{t+1} = Σᵢ (nᵢ/n) wᵢ        every parameter is trained, sent and averaged
"""

from fedfrozen_app.server.base import PlannedFedAvg


class FedAvg(PlannedFedAvg):
    """Train, send and average every parameter in every round."""

    paper = "McMahan et al. 2017, arXiv 1602.05629"
    pacings = ("deadline", "buffered")
