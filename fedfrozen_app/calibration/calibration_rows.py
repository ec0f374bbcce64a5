"""The rows that a model is calibrated on, which were not trained on. One part fits the temperature (if any),
the rest gives the quantile."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedfrozen_app.config import Config, excluded_clients
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.quantiles import LISTED
from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.local.worker import Worker

FOR_TEMPERATURE = 1 / 3  # share of a part's rows; only one number is fitted to them
SOURCES = ("clients", "server")


@dataclass(frozen=True)
class Part:
    """The loaded model's outputs on the rows of one client, or of the server."""

    name: str
    logits: npt.NDArray[np.float64]  # (rows, classes or edges); for regression the prediction, (rows,)
    labels: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    first: npt.NDArray[np.bool_]  # rows to which the temperature is fitted
    alone: npt.NDArray[np.bool_] | None = None  # one row of each patient or document; None: all rows


def choose_source(config: Config, asked: str | None) -> str:
    """The source of the rows: clients' rows if a round may ask for counts of them, else the server's own."""
    reason = (
        "its clients hold no rows out, because privacy=dp_sgd would not cover them"
        if config.privacy.name != "none"
        else "its sites hold their rows, and calibrate takes none from them"
        if config.runtime.name == "deployed"
        else ""
    )
    if asked == "clients" and reason:
        raise UserError(
            f"This run cannot be calibrated on clients' rows, because {reason}: use --rows server."
        )
    return asked or ("server" if reason or not config.dataset.client_validation else "clients")


def parts_of(worker: Worker, source: str) -> list[Part]:
    if source == "server":
        rows = {"server": torch.from_numpy(worker.data.shares.validation)}
    else:
        parts, left_out = worker.shares.partition, excluded_clients(worker.config)
        count = 0 if parts is None else len(parts.indices)
        shown = np.linspace(0, count - 1, min(count, LISTED)).round().astype(int)  # all, up to LISTED
        names = [str(number) for number in shown]
        rows = {name: worker.rows(name).validation for name in names if name not in left_out}
    rows = {name: own for name, own in rows.items() if len(own)}
    if not rows:
        key = "dataset.validation" if source == "server" else "dataset.client_validation"
        raise UserError(
            f"The run's {source} held no rows out to calibrate on ({key}): use --rows with the other."
        )
    return [_part(worker, name, own) for name, own in rows.items()]


def _part(worker: Worker, name: str, rows: torch.Tensor) -> Part:
    table = worker.data.train_table.take(rows.to(worker.device))
    units = np.unique(worker.corpus.units[rows.numpy()])  # all rows of a patient are in the same half
    numpy_generator(worker.config.seed, "calibration", name).shuffle(units)
    chosen = units[: round(len(units) * FOR_TEMPERATURE)]
    logits, labels = outputs(worker, table)
    of_rows = worker.corpus.units[rows.numpy()]
    alone = np.zeros(len(of_rows), dtype=bool)
    alone[np.unique(of_rows, return_index=True)[1]] = True
    return Part(name, logits, labels, np.isin(of_rows, chosen), alone)


def outputs(worker: Worker, table: object) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The model's logits, or its regression predictions in the labels' units; and the labels."""
    task = worker.task
    logits = task.all_logits(table)  # type: ignore[arg-type]
    plain = task.target.has_classes or task.target.time_to_event
    found = logits if plain else task.predictions(logits)
    labels = table.labels.cpu()  # type: ignore[attr-defined]
    return found.double().numpy(), (labels if task.target.has_classes else labels.double()).numpy()
