"""NIID-Bench's partitions of CIFAR-10: the same draws in the same order, so the same rows.

Its seeds (`init_seed`) are 0, 1 and 2.
"""

import numpy as np

CLIENTS = 10


def label_skew(labels: np.ndarray, seed: int, beta: float = 0.5, smallest: int = 10) -> list[list[int]]:
    """Each client's rows under `noniid-labeldir`.

    Per class, shuffled rows are cut by Dirichlet proportions. A client that has a tenth
    of all rows gets none.
    """
    draws = np.random.RandomState(seed)
    while True:
        clients: list[list[int]] = [[] for _ in range(CLIENTS)]
        for label in range(10):
            rows = np.flatnonzero(labels == label)
            draws.shuffle(rows)
            shares = draws.dirichlet(np.full(CLIENTS, beta))
            shares *= [len(own) < len(labels) / CLIENTS for own in clients]
            cuts = (np.cumsum(shares / shares.sum()) * len(rows)).astype(int)[:-1]
            for own, part in zip(clients, np.split(rows, cuts), strict=True):
                own.extend(part.tolist())
        if min(map(len, clients)) >= smallest:
            return clients


def homogeneous(labels: np.ndarray, seed: int) -> list[list[int]]:
    """Each client's rows under `homo`."""
    order = np.random.RandomState(seed).permutation(len(labels))
    return [part.tolist() for part in np.array_split(order, CLIENTS)]
