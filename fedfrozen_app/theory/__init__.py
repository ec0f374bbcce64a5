"""FedFrozen's argument in a model small enough to solve: attention, squared loss, ridge."""
