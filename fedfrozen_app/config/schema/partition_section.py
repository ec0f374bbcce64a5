"""`partition.*`: how the examples are split over the clients."""

from dataclasses import dataclass
from typing import ClassVar

from fedfrozen_app.config.needs import Needs, not_with, only_with
from fedfrozen_app.config.settings import setting


@dataclass
class PartitionConfig:
    NEEDS: ClassVar[tuple[Needs, ...]] = (
        not_with("runtime", "deployed", add="runtime=inprocess, which splits rows over simulated clients"),
    )
    name: str = setting(
        "dirichlet",
        "Set by the file",
        choices=(
            *("dirichlet", "iid", "labels", "shards", "quantity", "noise"),
            *("natural", "domain", "file", "like"),
        ),
    )
    alpha: float = setting(
        0.3,
        "Dirichlet concentration: small means few classes for each client, large means equal mixes",
        above=0,
        needs=only_with("partition", "dirichlet", "quantity", "domain"),
    )
    column: str | None = setting(
        None,
        "Column to divide by (`natural`, `domain`). `null`: the only one, or `domain`",
        needs=only_with("partition", "natural", "domain"),
    )
    min_size: int = setting(
        10,
        "No drawn client gets fewer rows. Where a Dirichlet draw leaves one short, rows of one class move to "
        "it from one other client, and the log says so",
        least=1,
    )
    clients_per_domain: int = setting(
        1,
        "`domain`: several clients share a domain by `partition.alpha`",
        least=1,
        needs=only_with("partition", "domain"),
    )
    labels: int = setting(
        2, "`labels`: classes of each client", least=1, needs=only_with("partition", "labels")
    )
    shards: int = setting(
        2, "`shards`: shards of each client", least=1, needs=only_with("partition", "shards")
    )
    balanced: bool = setting(
        False,
        "`dirichlet`: clients of equal size, each with a mix of classes of its own",
        needs=only_with("partition", "dirichlet"),
    )
    capped: bool = setting(
        False,
        "`dirichlet`: a client that has its share of all rows gets none of the classes that follow, as "
        "FedMA, NIID-Bench and NVFLARE do",
        needs=only_with("partition", "dirichlet"),
    )
    noise: float = setting(
        0.0,
        "Feature shift: client i of N sees its train pictures with Gaussian noise of standard deviation "
        "`noise`·i/N, in units of the pixels' range. With `dirichlet` or `labels`: label and feature shift "
        "together",
        least=0,
        most=10,
    )
    path: str | None = setting(
        None,
        "`file`: names the client of every train row. CSV with a column `client`, in the rows' order or with "
        "a column `row` (from 0); or JSON, a list of clients, or of each client a list of its rows",
        needs=only_with("partition", "file"),
    )
    census: str | None = setting(
        None,
        "`like`: the `census.json` of `fedfrozen census`, whose sites' sizes and label mixes clients get",
        needs=only_with("partition", "like"),
    )
