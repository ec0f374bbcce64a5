"""What an audited client writes down of its own private steps, for `fedfrozen audit` to judge.

With `privacy.audited=CLIENT` that client's real rounds are watched. The noisy gradients are read where the
optimiser takes them. What they should be made of is worked out a second time: each example's gradient,
clipped here by its definition and summed in float64, without noise. The difference must be the noise that was
paid for.

Canaries are made-up examples, each planted by the toss of a coin and then drawn, clipped and noised as rows
are. A canary's gradient is LENGTH times the bound, along one element of one trained array, another for each.
So canaries do not blur each other, nothing of the data is needed to make them, and each moves the sum by as
much as an example ever may: no others have more power (Nasr et al. 2023, arXiv 2302.07956, call them Dirac
canaries).

    CLIENT/canaries.safetensors    where they are, and the coins
    CLIENT/N.safetensors           the N-th round that was paid for

These files tell the noise. They stay where the client keeps its privacy record.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from fedfrozen_app.data.table import Table
from fedfrozen_app.errors import UserError
from fedfrozen_app.privacy.dpsgd import Clipping, NoisyOptimizer, Recipe, exact_products
from fedfrozen_app.privacy.keystream import Keystream
from fedfrozen_app.privacy.noise import Noise
from fedfrozen_app.privacy.steps import Steps
from fedfrozen_app.seeds import generators_of

LENGTH = 10.0  # of a canary's gradient before it is clipped, in units of the bound
CANARIES = "canaries.safetensors"


def record_folder(privacy: Path, client: str) -> Path:
    return privacy / "audit" / client


@dataclass(frozen=True)
class Canaries:
    coins: np.ndarray  # (canaries,) bool: whether it was planted
    names: tuple[str, ...]
    places: np.ndarray  # (canaries, 2): which of the names, and which element of it

    @classmethod
    def draw(cls, parameters: Mapping[str, Tensor], count: int) -> "Canaries":
        sizes = [value.numel() for value in parameters.values()]
        if count > sum(sizes):
            raise UserError(
                f"privacy.canaries={count} is more than the {sum(sizes)} elements that are trained, and each "
                "canary needs one of its own: set fewer."
            )
        stream = Keystream()
        elements = np.argsort(stream.words(sum(sizes)))[:count]
        ends = np.cumsum(sizes)
        arrays = np.searchsorted(ends, elements, side="right")
        places = np.stack([arrays, elements - (ends - sizes)[arrays]], axis=1)
        return cls(stream.uniform(count) < 0.5, tuple(parameters), places)

    @classmethod
    def of_run(cls, folder: Path, parameters: Mapping[str, Tensor], count: int) -> "Canaries":
        """Those of the rounds before; in the first round new ones."""
        if (folder / CANARIES).exists():
            return cls.read(folder)
        folder.mkdir(parents=True, exist_ok=True)
        drawn = cls.draw(parameters, count)
        tensors = {"coins": torch.from_numpy(drawn.coins), "places": torch.from_numpy(drawn.places)}
        save_file(tensors, folder / CANARIES, metadata={"names": json.dumps(drawn.names)})
        return drawn

    @classmethod
    def read(cls, folder: Path) -> "Canaries":
        with safe_open(folder / CANARIES, "np") as file:
            names = tuple(json.loads(file.metadata()["names"]))
            return cls(file.get_tensor("coins"), names, file.get_tensor("places"))

    def __len__(self) -> int:
        return len(self.coins)

    def units(self, first_row: int) -> list[np.ndarray]:
        """The planted ones as units of privacy: canary n is called row `first_row` + n."""
        return [np.array([first_row + number]) for number in np.flatnonzero(self.coins)]

    def elements(self, parameters: Mapping[str, Tensor]) -> np.ndarray:
        """Each canary's position among all elements of these arrays laid end to end; -1 where there is
        none."""
        starts = dict(
            zip(parameters, np.cumsum([0, *(value.numel() for value in parameters.values())]), strict=False)
        )
        start = np.array([starts.get(name, -1) for name in self.names], dtype=np.int64)[self.places[:, 0]]
        return np.where(start < 0, -1, start + self.places[:, 1])


@dataclass
class Figures:
    """One round's: sums over its steps."""

    server_round: int
    claimed: Steps  # what was paid for
    max_grad_norm: float
    steps: int = 0
    units: int = 0  # of which each step sampled
    sampled: int = 0
    squares: float = 0.0  # of what was sent less what it should be made of, in units of the noise paid for
    elements: int = 0
    products: float = 0.0  # of one step's differences with the next one's, in the same units
    pairs: int = 0
    along: float = 0.0  # of the differences and the rows' clipped sums, products, in units of the bound
    length: float = 0.0  # of those sums, squared
    repeats: tuple[str, ...] = ()  # which draws come out the same when they are drawn again
    epsilon: float = 0.0  # what the client told
    delta: float = 0.0
    unit: str = "example"


class Watch:
    """A way to the clipped sum, as the one it watches, which plants canaries in every sample."""

    def __init__(
        self,
        clipping: Clipping,
        canaries: Canaries,
        parameters: Mapping[str, nn.Parameter],
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], Optimizer],
        recipe: Recipe,
        figures: Figures,
        device: torch.device,
    ) -> None:
        self.optimizer: type[NoisyOptimizer] = clipping.optimizer
        self.figures, self.canaries = figures, canaries
        self._clipping, self._parameters, self._recipe = clipping, dict(parameters), recipe
        self._device = device
        self._elements = canaries.elements(parameters)
        # The same steps once more, from the gradients that were seen: what is sent must be their result.
        self._shadow = {
            name: nn.Parameter(value.detach().clone(), requires_grad=False)
            for name, value in parameters.items()
        }
        self._shadow_optimizer = make_optimizer(self._shadow)
        self._first_state: list[Tensor] | None = None
        self._first: Tensor | None = None
        self._last: Tensor | None = None
        self._seen: list[np.ndarray] = []
        self._there: list[np.ndarray] = []
        self._begin_step()

    def _begin_step(self) -> None:
        self._sum = {
            name: torch.zeros_like(value, dtype=torch.float64) for name, value in self._parameters.items()
        }
        self._present = np.zeros(len(self.canaries), dtype=bool)

    def load(self, table: Table, index: Tensor, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        rows, planted = index[index < len(table)], index[index >= len(table)] - len(table)
        before = [generator.get_state() for generator in generators_of(self._device)]
        self._first_state = self._first_state or before
        losses = self._clipping.load(table, rows, parameters)
        self._add(table.take(rows), before)
        if len(planted):
            self._plant(planted.cpu().numpy())
        self.figures.sampled += len(index)
        return losses

    def each(self, part: Table, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        return self._clipping.each(part, parameters)

    def _add(self, part: Table, states: list[Tensor]) -> None:
        """What these rows should give to the sum, with the dropout masks that they had."""
        generators = generators_of(self._device)
        after = [generator.get_state() for generator in generators]
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        with exact_products():
            slopes = self._clipping.each(part, self._parameters)
        for generator, state in zip(generators, after, strict=True):
            generator.set_state(state)
        if not len(part):
            return
        flat = [value.flatten(1).double().square().sum(dim=1) for value in slopes.values()]
        norms = torch.stack(flat).sum(dim=0).sqrt()
        factors = (self._recipe.max_grad_norm / norms).clamp(max=1.0)
        sound = torch.isfinite(norms)
        for name, value in slopes.items():
            self._sum[name] += torch.einsum("i,i...->...", factors[sound], value[sound].double())

    def _plant(self, numbers: np.ndarray) -> None:
        """Behind the gradients of the rows, where the optimiser clips and sums them as it does those."""
        self._present[numbers] = True
        arrays = np.array(self.canaries.names)[self.canaries.places[numbers, 0]]
        for name, parameter in self._parameters.items():
            here = np.flatnonzero(arrays == name)
            planted = parameter.new_zeros(len(numbers), parameter.numel())
            planted[here, self.canaries.places[numbers[here], 1]] = LENGTH * self._recipe.max_grad_norm
            rows = parameter.grad_sample  # type: ignore[attr-defined]
            parameter.grad_sample = torch.cat([rows, planted.view(-1, *parameter.shape)])  # type: ignore[attr-defined]

    def attach(self, optimizer: Optimizer, units: int) -> None:
        """See every gradient that this optimiser is given."""
        self.figures.units = units
        optimizer.register_step_pre_hook(lambda *_: self._before_step())

    def _before_step(self) -> None:
        figures, bound = self.figures, self._recipe.max_grad_norm
        sent, made_of = [], []
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None
            self._shadow[name].grad = parameter.grad.detach().clone()
            sent.append(parameter.grad.detach().double().flatten() * self._recipe.batch)
            made_of.append(self._sum[name].flatten())
        self._shadow_optimizer.step()
        rest = (torch.cat(sent) - torch.cat(made_of)) / bound
        known = self._elements >= 0
        seen = np.full(len(self.canaries), np.nan)
        seen[known] = rest[self._elements[known]].cpu().numpy()
        self._seen.append(seen)
        self._there.append(self._present & known)
        rest[self._elements[self._present & known]] -= 1
        rows_sum = torch.cat(made_of) / bound
        figures.along += float(rest @ rows_sum)
        figures.length += float(rows_sum.square().sum())
        noise = rest / figures.claimed.noise
        figures.squares += float(noise.square().sum())
        figures.elements += len(noise)
        if self._last is None:
            self._first = noise
        else:
            figures.products += float(noise @ self._last)
            figures.pairs += len(noise)
        self._last = noise
        figures.steps += 1
        self._begin_step()

    def close(self, fresh: Callable[[], Noise]) -> None:
        """Whether a source that is made anew for this very round draws what others drew."""
        states = []
        with fresh().dropout():
            states = [generator.get_state() for generator in generators_of(self._device)]
        zeros = torch.zeros(64, device=self._device)
        same = {
            "dropout": self._first_state is not None
            and all(torch.equal(*both) for both in zip(states, self._first_state, strict=True)),
            "samples": np.array_equal(fresh().poisson(256, 0.5), fresh().poisson(256, 0.5)),
            "noise": torch.equal(fresh().added_to(zeros, 1.0), fresh().added_to(zeros, 1.0)),
        }
        self.figures.repeats = tuple(name for name, equal in same.items() if equal)

    def write(self, path: Path) -> None:
        tensors = {f"made/{name}": value.detach().cpu().contiguous() for name, value in self._shadow.items()}
        tensors["seen"] = torch.from_numpy(np.array(self._seen))
        tensors["there"] = torch.from_numpy(np.array(self._there))
        if self._first is not None:
            tensors["first"] = self._first.float().cpu()
        part = path.with_suffix(".part")
        save_file(tensors, part, metadata={"figures": json.dumps(asdict(self.figures))})
        part.replace(path)


@dataclass(frozen=True)
class WatchedRound:
    figures: Figures
    seen: np.ndarray  # (steps, canaries), in units of the bound; NaN where a canary's array did not train
    there: np.ndarray  # (steps, canaries): in the sample
    first: np.ndarray | None  # (elements,): the first step's noise
    made: dict[str, np.ndarray]  # what the steps that were seen make of the round's model


def read_rounds(folder: Path) -> list[WatchedRound]:
    paths = [path for path in folder.glob("*.safetensors") if path.stem.isdigit()]
    return [_read_round(path) for path in sorted(paths, key=lambda path: int(path.stem))]


def _read_round(path: Path) -> WatchedRound:
    with safe_open(path, "np") as file:
        figures: dict[str, Any] = json.loads(file.metadata()["figures"])
        figures["claimed"] = Steps(*figures["claimed"])
        figures["repeats"] = tuple(figures["repeats"])
        names = list(file.keys())
        made = {name[5:]: file.get_tensor(name) for name in names if name.startswith("made/")}
        first = file.get_tensor("first") if "first" in names else None
        return WatchedRound(
            Figures(**figures), file.get_tensor("seen"), file.get_tensor("there"), first, made
        )
