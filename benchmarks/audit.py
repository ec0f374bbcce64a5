"""What `fedfrozen audit` finds in clients that were broken on purpose, and how often it fails an honest one.

    python benchmarks/audit.py --repeats 3 --honest 20

A small ViT with dropout trains on the digits, privately, at epsilon 1 and 8, with one client watched. Each
break is put into the very code that trains; the claim stays as it was. Every row of the table is so many runs
of their own.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import arguments, show, write_result

from fedfrozen_app.audit.claim import EXCEEDED
from fedfrozen_app.audit.command import check_claims
from fedfrozen_app.config import compose_run
from fedfrozen_app.core.seeds import numpy_generator, seed_for
from fedfrozen_app.local import private
from fedfrozen_app.local.private import PrivateClient
from fedfrozen_app.local.sequential import LocalResult
from fedfrozen_app.privacy.dpsgd import NoisyOptimizer
from fedfrozen_app.privacy.noise import SecretNoise
from fedfrozen_app.report import output
from fedfrozen_app.run import evaluation
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

WORDS = (
    "strategy=fedavg",
    "num_clients=2",
    "partition=iid",
    "dataset.limit=400",
    "num_rounds=3",
    "eval_every=3",
    "client.batch_size=32",
    "client.lr=0.01",
    "model=vit_tiny",
    "model.config.hidden_size=16",
    "model.config.intermediate_size=32",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2",
    "model.config.hidden_dropout_prob=0.1",
    "runtime.threads=1",
    "track.tensorboard=false",
    "privacy=dp_sgd",
    "privacy.audited='0'",
)


# What is broken ------------------------------------------------------------------------------------------


def noise_off() -> list[Any]:
    return [patch.object(SecretNoise, "added_to", lambda self, value, std: value)]


def noise_halved() -> list[Any]:
    whole = SecretNoise.added_to
    return [patch.object(SecretNoise, "added_to", lambda self, value, std: whole(self, value, std / 2))]


def noise_repeated() -> list[Any]:
    """As large as it should be, and the same in every step."""

    def again(self: SecretNoise, value: torch.Tensor, std: float) -> torch.Tensor:
        kept = self.__dict__.setdefault("kept", {})
        if value.shape not in kept:
            kept[value.shape] = self._stream.gaussians(value.numel(), value.device).view(value.shape)
        return (value + kept[value.shape] * std).to(value.dtype)

    return [patch.object(SecretNoise, "added_to", again)]


def clipping_off() -> list[Any]:
    def add_up(self: NoisyOptimizer) -> None:
        for parameter in self.params:
            total = parameter.grad_sample.sum(dim=0)
            held = parameter.summed_grad
            parameter.summed_grad = total if held is None else held + total

    return [patch.object(NoisyOptimizer, "clip_and_accumulate", add_up)]


def clipping_by_array() -> list[Any]:
    """Each array's gradient to the bound, so that the whole has up to √arrays times as much."""

    def by_array(self: NoisyOptimizer) -> None:
        for parameter in self.params:
            each = parameter.grad_sample
            factors = (self.max_grad_norm / (each.flatten(1).norm(dim=1) + 1e-6)).clamp(max=1.0)
            total = torch.einsum("i,i...->...", factors, each)
            held = parameter.summed_grad
            parameter.summed_grad = total if held is None else held + total

    return [patch.object(NoisyOptimizer, "clip_and_accumulate", by_array)]


def samples_too_large() -> list[Any]:
    drawn = SecretNoise.poisson
    return [
        patch.object(SecretNoise, "poisson", lambda self, size, rate: drawn(self, size, min(1.0, 2 * rate)))
    ]


def rounds_unpaid() -> list[Any]:
    """Noise for one round and paid for once; the other rounds are free."""
    opened, paid = PrivateClient._open, PrivateClient._pay

    def open_for_one(self: PrivateClient) -> Any:
        with patch.dict(self.request.participations, {self.client: 1}):
            return opened(self)

    def pay_once(self: PrivateClient, budget: Any, due: list[Any]) -> None:
        paid(self, budget, due if not budget.steps else [])

    return [
        patch.object(PrivateClient, "_open", open_for_one),
        patch.object(PrivateClient, "_pay", pay_once),
        patch.object(PrivateClient, "epsilon_after", _epsilon_of_paid),
    ]


def _epsilon_of_paid(self: PrivateClient, budget: Any, steps: list[Any]) -> float:
    """Never more than is on record, so that nothing is declined."""
    return private.epsilon_of(
        budget.steps or steps, budget.delta, self.worker.config.privacy.accountant, self._limit
    )


def accountant_halves() -> list[Any]:
    """It tells half of what is spent, so that the noise is solved for twice the budget."""
    whole, solve = private.epsilon_of, private.solve_noise
    return [
        patch.object(private, "epsilon_of", lambda *words: whole(*words) / 2),
        patch.object(
            private, "solve_noise", lambda *words, epsilon, **more: solve(*words, epsilon=2 * epsilon, **more)
        ),
    ]


def dropout_seeded() -> list[Any]:
    """From the run's seed, which everybody knows."""

    def known(self: SecretNoise) -> tuple[int, np.ndarray]:
        words = numpy_generator(0, "dropout").integers(2**32, size=624, dtype=np.uint64)
        return seed_for(0, "dropout"), words

    return [patch.object(SecretNoise, "_dropout_words", known)]


def sent_without_noise() -> list[Any]:
    """Half of the noise's way is taken back after training, where no step sees it."""
    whole = LocalResult.sent

    def nearer(self: LocalResult, names: Any) -> Any:
        return {name: value * 0.5 for name, value in whole(self, names).items()}

    return [patch.object(LocalResult, "sent", nearer)]


BREAKS: dict[str, Callable[[], list[Any]]] = {
    "nothing": list,
    "noise off": noise_off,
    "noise halved": noise_halved,
    "noise the same in every step": noise_repeated,
    "clipping off": clipping_off,
    "clipping array by array": clipping_by_array,
    "samples twice as large": samples_too_large,
    "two rounds of three unpaid": rounds_unpaid,
    "accountant tells half": accountant_halves,
    "dropout seeded": dropout_seeded,
    "another thing is sent": sent_without_noise,
}


# The runs ------------------------------------------------------------------------------------------------


@contextmanager
def broken(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for one in BREAKS[name]():
            stack.enter_context(one)
        yield


def audit(name: str, epsilon: float, canaries: int, *more: str) -> dict[str, Any]:
    """The claim of one client, broken in this way, as `fedfrozen audit` judges it."""
    torch.set_num_threads(1)
    words = [*WORDS, f"privacy.epsilon={epsilon:g}", f"privacy.canaries={canaries}", *more]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for module, function in (
            (output, "write_curves"),
            (output, "write_selection"),
            (evaluation, "draw_labels"),
        ):
            stack.enter_context(patch.object(module, function, lambda *args, **kwargs: None))
        composed = compose_run(words)
        with broken(name):
            run_in_process(Job(composed, Path(folder), None))
        (claim,) = check_claims(Path(folder))
    return claim


def by_what(claim: dict[str, Any]) -> list[str]:
    return [name for name, check in claim["checks"].items() if check["word"] == EXCEEDED]


def main() -> None:
    parser = arguments(str(__doc__), repeats=3)
    parser.add_argument("--honest", type=int, default=20, help="runs with nothing broken, at each epsilon")
    parser.add_argument("--canaries", type=int, default=1000)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    rows = []
    for name in BREAKS:
        for epsilon in (1.0, 8.0):
            runs = options.honest if name == "nothing" else options.repeats
            claims = [audit(name, epsilon, options.canaries) for _ in range(runs)]
            words = [claim["verdict"] for claim in claims]
            checks = sorted({check for claim in claims for check in by_what(claim)})
            counts = {check: sum(check in by_what(claim) for claim in claims) for check in checks}
            canary = [claim["checks"]["canaries"] for claim in claims]
            lower = [one["epsilon_lower"] for one in canary]
            found[f"{name}, epsilon {epsilon:g}"] = {
                "verdicts": {word: words.count(word) for word in sorted(set(words))},
                "exceeded_by_check": counts,
                "epsilon_lower": lower,
                "epsilon_most": canary[0]["epsilon_most"],
                "epsilon_claimed": [claim["epsilon_claimed"] for claim in claims],
            }
            told = ", ".join(f"{word} {words.count(word)}/{runs}" for word in sorted(set(words)))
            caught = ", ".join(f"{check} {count}" for check, count in counts.items())
            rows.append([name, f"{epsilon:g}", told, caught, f"{min(lower):.2f}–{max(lower):.2f}"])
            print(rows[-1], flush=True)
    path = write_result("audit", {"canaries": options.canaries, "figures": found})
    header = ["broken", "claim", "verdict", "found by (runs)", "epsilon above, by canaries"]
    show("The audit of broken clients", header, rows, {}, path)


if __name__ == "__main__":
    main()
