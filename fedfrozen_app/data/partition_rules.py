"""Partition rules of common benchmarks, each of which terminates: rows per client, and a description.

flwr-datasets has a PathologicalPartitioner and a ShardPartitioner. They are not used: the first leaves out
the rows of every class that its draw passes over, the second the rows that fill no whole shard, and here
every row goes to one client.
"""

from collections.abc import Sequence

import numpy as np

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.row_lists import RowLists

Dealt = tuple[list[np.ndarray], str]


def by_labels(labels: np.ndarray, count: int, per_client: int, rng: np.random.Generator) -> Dealt:
    """Every client has so many classes, every class its clients, as evenly as can be ("pathological").

    McMahan et al. 2017 and NIID-Bench (Li et al. 2022, #C=k). A class's rows are shared out evenly among the
    clients that have it.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    if per_client > len(classes):
        raise UserError(
            f"partition.labels={per_client} is more than the {len(classes)} classes there are: set it to "
            f"{len(classes)} or less."
        )
    if count * per_client < len(classes):
        raise UserError(
            f"{counted(count, 'client')} with partition.labels={per_client} have no place for {len(classes)} "
            f"classes: set partition.labels to {-(-len(classes) // count)} or more, or use more clients."
        )
    holders: list[list[int]] = [[] for _ in classes]
    used = np.zeros(len(classes), dtype=np.int64)
    for client in rng.permutation(count):
        # The classes that fewest have so far; which of those that are equal, is drawn.
        for number in np.lexsort((rng.random(len(classes)), used))[:per_client]:
            holders[number].append(int(client))
            used[number] += 1
    clients: list[list[np.ndarray]] = [[] for _ in range(count)]
    for number, (own, size) in enumerate(zip(holders, sizes, strict=True)):
        if size < len(own):
            raise UserError(
                f"A class with {counted(int(size), 'row')} would go to {len(own)} clients: set num_clients "
                "or partition.labels lower."
            )
        rows = rng.permutation(np.flatnonzero(labels == classes[number]))
        for client, part in zip(own, np.array_split(rows, len(own)), strict=True):
            clients[client].append(part)
    return [np.concatenate(parts) for parts in clients], f"{counted(per_client, 'label')} a client"


def by_shards(labels: np.ndarray, count: int, per_client: int, rng: np.random.Generator) -> Dealt:
    """The rows in class order, cut into equal shards; each client draws so many (McMahan et al. 2017)."""
    if count * per_client > len(labels):
        raise UserError(
            f"{count} clients with partition.shards={per_client} need {count * per_client} shards of one row "
            f"or more, and there are {len(labels)} train rows: set partition.shards or num_clients lower."
        )
    shuffled = rng.permutation(len(labels))
    ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shards = np.array_split(ordered, count * per_client)
    drawn = rng.permutation(len(shards)).reshape(count, per_client)
    return (
        [np.concatenate([shards[number] for number in own]) for own in drawn],
        f"{counted(per_client, 'shard')} a client",
    )


def by_quantity(rows: int, count: int, alpha: float, min_size: int, rng: np.random.Generator) -> Dealt:
    """Alike but in size: each has `min_size`, and the rest goes by one draw from Dirichlet(alpha)."""
    shares = rng.dirichlet(np.full(count, alpha))
    if not np.isfinite(shares).all():  # so small an alpha that all draws are zero: one client has it all
        shares = np.eye(count)[rng.integers(count)]
    sizes = min_size + whole(shares, rows - count * min_size)
    return np.split(rng.permutation(rows), np.cumsum(sizes)[:-1]), f"Sizes by Dirichlet({alpha:g})"


def balanced_dirichlet(labels: np.ndarray, count: int, alpha: float, rng: np.random.Generator) -> Dealt:
    """Equal sizes, each client with a mix of classes of its own (as in FedDyn, Acar et al. 2021).

    The mixes are drawn from Dirichlet(alpha), and then fitted to the rows there are of each class by scaling
    clients and classes in turn, which leaves them as near as can be (iterative proportional fitting).
    """
    classes, available = np.unique(labels, return_counts=True)
    asked = rng.dirichlet(np.full(len(classes), alpha), size=count)
    asked = np.where(np.isfinite(asked).all(axis=1, keepdims=True), asked, 0.0)
    empty = asked.sum(axis=1) == 0  # so small an alpha that the whole draw is zero: one class
    asked[empty] = np.eye(len(classes))[rng.integers(len(classes), size=int(empty.sum()))]
    sizes = np.full(count, len(labels) // count)
    sizes[: len(labels) % count] += 1
    wanted = asked * sizes[:, None] + 1e-9  # no cell is closed: some split always fits
    for _ in range(200):
        wanted *= (available / wanted.sum(axis=0))[None, :]
        wanted *= (sizes / wanted.sum(axis=1))[:, None]
    counts = fitted(wanted, sizes, available)
    clients: list[list[np.ndarray]] = [[] for _ in range(count)]
    for number, name in enumerate(classes):
        rows = rng.permutation(np.flatnonzero(labels == name))
        for client, part in enumerate(np.split(rows, np.cumsum(counts[:, number])[:-1])):
            clients[client].append(part)
    apart = np.abs(counts / sizes[:, None] - asked).sum(axis=1).mean() / 2
    note = (
        f"Dirichlet({alpha:g}) with equal sizes, {apart:.0%} of a client's rows in other classes than drawn"
    )
    return [np.concatenate(parts) for parts in clients], note


def fitted(wanted: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Whole numbers near `wanted` with just these sums of rows and of columns, which have one total."""
    counts = np.floor(np.minimum(wanted, np.minimum(rows[:, None], columns[None, :]))).astype(np.int64)
    # Where the scaling has not settled a sum may be too high: what is over goes first, from the largest.
    while (over := counts.sum(axis=1) - rows).max() > 0:
        counts[over.argmax(), counts[over.argmax()].argmax()] -= 1
    while (over := counts.sum(axis=0) - columns).max() > 0:
        counts[counts[:, over.argmax()].argmax(), over.argmax()] -= 1
    short, left = rows - counts.sum(axis=1), columns - counts.sum(axis=0)
    for row in np.argsort(-short, kind="stable"):
        while short[row]:  # what is missing goes where most of it was cut off, and some is left
            column = np.where(left > 0, wanted[row] - counts[row], -np.inf).argmax()
            counts[row, column] += 1
            short[row] -= 1
            left[column] -= 1
    return counts


def whole(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in these shares, with this sum: the largest remainders are rounded up."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


def fill_up(clients: Sequence[np.ndarray], labels: np.ndarray, min_size: int) -> tuple[list[np.ndarray], int]:
    """Give each client its minimum, of one class from one donor where one has enough; how many rows moved.

    Taken row by row from the largest client, a short client would get a bit of everything, and the strongest
    skew that can be asked for would come out milder than a weaker one.
    """
    classes, numbers = np.unique(labels, return_inverse=True)
    held = [[rows[numbers[rows] == number].tolist() for number in range(len(classes))] for rows in clients]
    counts = np.array([[len(rows) for rows in own] for own in held])  # (clients, classes)
    moved = 0
    # While one client is short another is above the minimum, because the rows suffice for all.
    for client in range(len(clients)):
        while (need := min_size - counts[client].sum()) > 0:
            spare = np.maximum(counts.sum(axis=1) - min_size, 0)
            spare[client] = 0
            taken = np.minimum(np.minimum(counts, spare[:, None]), need)
            # As many at once as possible; then a class that it has; then from the client with most of it.
            has, most = counts[client] / (counts[client].sum() + 1), counts / (counts.sum() + 1)
            score = 4 * taken + (2 * has[None, :] + most) * (taken > 0)
            donor, number = np.unravel_index(score.argmax(), score.shape)
            for _ in range(taken[donor, number]):
                held[client][number].append(held[donor][number].pop())
            counts[client, number] += taken[donor, number]
            counts[donor, number] -= taken[donor, number]
            moved += int(taken[donor, number])
    return [np.array([row for rows in own for row in rows], dtype=np.int64) for own in held], moved


def label_entropy(clients: Sequence[np.ndarray], labels: np.ndarray) -> float:
    """The mean over clients of the entropy of their labels, in nats: 0 where each has one class."""
    found = []
    for rows in clients:
        if len(rows):
            shares = np.unique(labels[rows], return_counts=True)[1] / len(rows)
            found.append(float(-(shares * np.log(shares)).sum()))
    return sum(found) / len(found)


def entropy_of(clients: RowLists, labels: np.ndarray) -> float:
    """The same of very many clients."""
    classes, numbers = np.unique(labels, return_inverse=True)
    counts = clients.counts(numbers, len(classes))
    counts = counts[counts.sum(axis=1) > 0]
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(-(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1).mean())
