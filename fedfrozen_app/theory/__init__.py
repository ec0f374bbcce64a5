"""FedFrozen's argument in a model with a closed-form solution: attention, squared loss, ridge."""
