"""Small real runs for every test: real digits, a real ViT, the real apps, in seconds."""

import gc
import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Here, because a worker can have one browser: where two folders bring the same fixture, there are two of it.
from tests.report.browser import chromium, visit  # noqa: F401

# pytest's first process reads this file before it starts those that test, and has no use for torch.
if TYPE_CHECKING:
    import torch

    from fedfrozen_app.local.worker import Worker

# Helpers that assert: pytest shows what they compared, as in a test.
HELPERS = ("comparing", "resuming", "local.runners", "runtimes.inprocess.concurrent", "secure.runs")
pytest.register_assert_rewrite(*(f"tests.{name}" for name in HELPERS))

SMALL = [
    "num_clients=3",
    "num_rounds=3",
    "dataset.limit=160",
    "partition.min_size=8",
    "model.config.hidden_size=16",
    "model.config.intermediate_size=32",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2",
    "client.batch_size=16",
    "client.local_epochs=1",
    "runtime.threads=1",
    "runtime.runner=sequential",
]

# For the commands that tests start too: each worker of pytest has a core, and threads beyond it only spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# In memory where there is enough of it: a twentieth of the suite's time was waiting until a disk has what is
# written. What a test leaves is removed when it has passed.
MEMORY, ENOUGH = Path("/dev/shm"), 4 << 30
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ENOUGH:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # What a script starts with & ignores Ctrl-C, and hands that on: the commands under test must hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What takes or waits longest: begun first, so that no worker sits idle at the end beside one that does.
LONG = ("tests/runtimes/flower", "tests/golden", "tests/app/test_command")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish() -> None:
    """All that was imported stays: Python need not look through it for garbage again and again."""
    gc.collect()
    gc.freeze()


# Here composing itself is tested.
COMPOSING = ("composed", "composed_once", "moved_defaults", "packages", "remembered", "sections")


@pytest.fixture(autouse=True, scope="session")
def _cached_composition(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For the fixtures of a whole module too."""
    from tests.cached_composition import files_read_once, remembered

    place = tmp_path_factory.getbasetemp()
    # Every worker of pytest has a folder of its own in one that is this run's.
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    with files_read_once(), remembered(place / "composed"):
        yield


@pytest.fixture(autouse=True)
def _composition(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.node.nodeid.startswith(tuple(f"tests/config/test_{name}.py" for name in COMPOSING)):
        yield
        return
    from tests.cached_composition import by_hydra_alone

    with by_hydra_alone():
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    """Bits repeat for a thread count; one is also quickest for models this small."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_kernels():
    """Where the CPU has no bf16, torch turns oneDNN off for good at the first product in it."""
    import torch

    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before


@pytest.fixture(autouse=True, scope="session")
def _savefig() -> Iterator[Any]:
    """PNG files hold one pixel: drawing a run's takes longer than a run as small as these. A test of what is
    drawn has the mark `pictures`; processes that a test starts draw theirs. The fixture is what draws."""
    from matplotlib.figure import Figure
    from PIL import Image

    def blank(figure: Figure, file: Any, **options: Any) -> None:
        Image.new("RGB", (1, 1)).save(file, "PNG")

    with pytest.MonkeyPatch.context() as patch:
        draws = Figure.savefig
        patch.setattr(Figure, "savefig", blank)
        yield draws


@pytest.fixture(autouse=True)
def _pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _savefig: Any) -> None:
    if "pictures" in request.keywords:
        from matplotlib.figure import Figure

        monkeypatch.setattr(Figure, "savefig", _savefig)


class Run:
    """What a finished run left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def model(self) -> "dict[str, torch.Tensor]":
        return _arrays(self.folder / "model.safetensors")

    def model_after(self, server_round: int) -> "dict[str, torch.Tensor]":
        return _arrays(self.folder / "checkpoints" / str(server_round) / "model.safetensors")


def _arrays(path: Path) -> "dict[str, torch.Tensor]":
    from safetensors.torch import load_file

    return load_file(path)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train in process with overrides on top of the small settings; `folder` names the run.

    Without the pictures, which take longer to draw than such a run to train; runs through the command
    draw them.
    """
    from fedfrozen_app.config import compose_run
    from fedfrozen_app.files import checkpoint
    from fedfrozen_app.report import output, personal
    from fedfrozen_app.run import evaluation
    from fedfrozen_app.run.job import Job
    from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

    monkeypatch.setattr(output, "write_curves", lambda *args, **kwargs: None)
    monkeypatch.setattr(output, "write_selection", lambda *args: None)
    monkeypatch.setattr(evaluation, "draw_labels", lambda *args: None)
    monkeypatch.setattr(personal, "fairness_picture", lambda *args: None)

    def train(*overrides: str, folder: str = "run", resume: bool = False, small: bool = True) -> Run:
        target = tmp_path / folder
        words = [*(SMALL if small else ()), *overrides]
        composed = compose_run(words)
        config = composed.config
        start = checkpoint.newest(target) if resume else None
        if config.start_from:
            start = checkpoint.read(Path(config.start_from))
        run_in_process(Job(composed, target, start))
        return Run(target)

    return train


def worker_of(*words: str) -> "Worker":
    """What a worker holds for a run of these words: model, data and the clients' rows."""
    from fedfrozen_app.config import compose_config, read, resolved
    from fedfrozen_app.data.federated import load_corpus, share_out
    from fedfrozen_app.local.worker import Worker

    config = read(resolved(compose_config(list(words))))
    corpus = load_corpus(config)
    return Worker(config, corpus, shares=share_out(corpus, config, config.num_clients))


def slowly(*cases: Any) -> list[Any]:
    """Further cases of a test, for `pytest -m slow`."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def named(cases: dict[str, Any], *quick: str) -> list[Any]:
    """These cases of a test by their names; all but the `quick` ones for `pytest -m slow`."""
    assert set(quick) <= cases.keys()
    return [
        pytest.param(case, id=name, marks=() if name in quick else pytest.mark.slow)
        for name, case in cases.items()
    ]


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files end at so many bytes, half-written, as they would on a disk that has no more room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def same_bits(one: "dict[str, torch.Tensor]", other: "dict[str, torch.Tensor]") -> bool:
    import torch

    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def pairs(tmp_path, train):
    """Runs alone, and the same runs beside one another in one process."""
    from tests.runtimes.inprocess.concurrent import alone_and_together

    return partial(alone_and_together, train, tmp_path)


@pytest.fixture(scope="session")
def package(tmp_path_factory):
    """The folder into which pip has installed the package of docs/adding-a-strategy.md."""
    from tests.app.page_package import install_page_package

    return install_page_package(tmp_path_factory.mktemp("page"))


@pytest.fixture
def installed(package):
    """The same folder, while its package can be imported."""
    from tests.foreign_packages import on_path

    with on_path(package, "mymethods") as folder:
        yield folder
