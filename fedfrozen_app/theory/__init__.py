"""FedFrozen's argument in a model small enough to solve: linear attention, squared loss, ridge."""
