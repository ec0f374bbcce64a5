"""A package of somebody else's, installed from a wheel, brings a strategy and its files."""

import subprocess
import sys

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands.completion import words
from fedfrozen_app.config import compose_config, read, resolved, strategy_settings
from fedfrozen_app.config.keys import check_keys
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from tests.foreign_packages import install, make_wheel, on_path

STRATEGIES = sorted([*registry.BUILT_IN["strategies"], "gentle"])
FILES = {
    "gentle_package/__init__.py": "",
    "gentle_package/strategy.py": """
from dataclasses import dataclass

from fedfrozen_app.config import setting
from fedfrozen_app.server import base


@dataclass(frozen=True)
class Settings(base.Settings):
    gentleness: float = setting(0.5, "How gently to train", above=0, most=1)
    remark: str = "none"  # a setting that says nothing of itself


class Gentle(base.PlannedFedAvg):
    Settings = Settings
""",
    "gentle_package/conf/strategy/gentle.yaml": (
        "# Gently.\ndefaults: [base_gentle, _self_]\nremark: from the file\n"
    ),
    "gentle_package/conf/experiment/gently.yaml": (
        "# @package _global_\n# fedfrozen experiment=gently\n"
        "defaults:\n  - override /strategy: gentle\nnum_rounds: 2\n"
    ),
    "gentle_package/conf/client/gentle.yaml": "# Slow steps.\ndefaults: [base, _self_]\nlr: 1.0e-5\n",
}
ENTRY_POINTS = {
    "fedfrozen.strategies": {"gentle": "gentle_package.strategy:Gentle"},
    "fedfrozen.conf": {"gentle": "gentle_package"},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which pip has installed the package."""
    folder = tmp_path_factory.mktemp("wheel")
    return install(make_wheel(folder, "gentle_package", FILES, ENTRY_POINTS), folder / "site")


@pytest.fixture
def installed(site):
    with on_path(site, "gentle_package") as folder:
        yield folder


def test_its_strategy_composes_with_its_own_defaults(installed):
    config = read(resolved(compose_config(["strategy=gentle", "strategy.gentleness=0.25", "client=gentle"])))
    assert config.strategy == {"name": "gentle", "gentleness": 0.25, "remark": "from the file"}
    assert config.client.lr == 1e-5 and config.client.batch_size == 16
    assert strategy_settings(config).gentleness == 0.25
    assert resolved(compose_config(["experiment=gently"]))["strategy"]["name"] == "gentle"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "strategy=gentel",
            f"Unknown strategy 'gentel': choose one of {', '.join(STRATEGIES)}",
        ),
        (
            "strategy.gentleness=2",
            "strategy.gentleness=2.0 is out of range: it must be above 0 and at most 1.",
        ),
        ("strategy.gentlenes=1", "did you mean strategy.gentleness?"),
        ("strategy.gentleness=much", "strategy.gentleness: Value 'much'"),
    ],
)
def test_its_mistakes_are_told_as_ours_are(installed, word, told, capsys):
    assert command(["strategy=gentle", word]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_line_knows_it(installed, capsys):
    assert {"strategy=gentle", "client=gentle", "strategy.gentleness="} <= set(words())
    assert command(["plan", "strategy=gentle", "num_rounds=2"]) == 0
    assert capsys.readouterr().out.startswith("gentle, vit_mini")


@pytest.mark.slow
def test_hydra_s_own_command_line_knows_it(installed, tmp_path):
    """--help, --cfg and a multirun, each in a process of its own."""
    code = f"""
import sys
sys.path.insert(0, {str(installed)!r})
from fedfrozen_app.__main__ import run
from fedfrozen_app.config import with_hydra
try:
    run(["--help"])
except SystemExit:
    pass
with_hydra(lambda composed: print("ran", composed.strategy.name, composed.seed),
           ["-m", "strategy=fedavg,gentle", "seed=1", "hydra.sweep.dir={tmp_path}"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed = groups_of(done.stdout)
    assert sorted(listed["strategy"]) == STRATEGIES
    # What they inherit is no choice.
    assert sorted(listed["client"]) == ["adamw", "gentle", "prompts", "sgd"]
    assert "ran fedavg 1" in done.stdout and "ran gentle 1" in done.stdout


def groups_of(page):
    """The files of each group, as the help lists them: a group's further lines are indented deeper."""
    found, own = {}, []
    for line in page.partition("settings in groups")[2].splitlines()[1:]:
        if not line.startswith("  "):
            break
        words = line.split()
        if not line.startswith("   "):
            found[words.pop(0)] = own = []
        own += words
    return found


@pytest.mark.parametrize(
    "conf", [pytest.param(False, marks=pytest.mark.slow, id="no conf"), pytest.param(True, id="another file")]
)
def test_a_method_without_a_file_is_told_what_to_add(conf, tmp_path, capsys):
    """An entry point alone: the class is there, and nothing lets a configuration choose it."""
    files = {
        "bare_package/__init__.py": "",
        "bare_package/methods.py": "from fedfrozen_app.server import base, optimizer\n"
        "class Bare(base.PlannedFedAvg):\n    pass\nclass Step(optimizer.NoOptimizer):\n    pass\n",
    }
    points = {
        "fedfrozen.strategies": {"bare": "bare_package.methods:Bare"},
        "fedfrozen.server_optimizers": {"bare_step": "bare_package.methods:Step"},
    }
    if conf:
        files["bare_package/conf/client/slow.yaml"] = "defaults: [base, _self_]\nlr: 1.0e-5\n"
        points["fedfrozen.conf"] = {"bare_package": "bare_package"}
    site = install(make_wheel(tmp_path, "bare_package", files, points), tmp_path / "site")
    with on_path(site, "bare_package"):
        for words, group, name in (
            (["strategy=bare"], "strategy", "bare"),
            (["plan", "strategy=bare"], "strategy", "bare"),
            (["-m", "strategy=fedavg,bare"], "strategy", "bare"),
            (["--cfg", "job", "strategy=bare"], "strategy", "bare"),
            (["server_optimizer=bare_step"], "server_optimizer", "bare_step"),
        ):
            assert command(words) == 2
            assert capsys.readouterr().err == (
                f"fedfrozen: The installed package 'bare_package' offers {group}={name} but no file for it: "
                f"add conf/{group}/{name}.yaml with `defaults: [base_{name}]` to it, and in its "
                'pyproject.toml, under [project.entry-points."fedfrozen.conf"], bare_package = '
                '"bare_package".\n'
            )
        with pytest.raises(UserError, match="offers strategy=bare but no file for it: add conf/strategy"):
            compose_config(["strategy=bare"])


def test_a_package_without_the_folder_is_told_and_passed_over(monkeypatch, caplog):
    monkeypatch.setattr(
        registry, "places", lambda group: {"lost": "no_such_package"} if group == "conf" else {}
    )
    compose_config(["strategy=fedavg"])
    assert "The installed package 'lost' has no folder conf/" in caplog.text


@pytest.fixture
def unlisted(monkeypatch):
    """strategies/term.py and clients/term.py as their author leaves them who has not listed them yet."""
    for group in ("strategies", "algorithms"):
        rest = {name: place for name, place in registry.BUILT_IN[group].items() if name != "term"}
        monkeypatch.setitem(registry.BUILT_IN, group, rest)
    registry.places.cache_clear()
    yield
    registry.places.cache_clear()


def test_a_method_s_file_that_is_not_listed_names_the_table(unlisted):
    for group, folder in (("strategies", "strategies"), ("algorithms", "clients")):
        with pytest.raises(UserError) as found:
            registry.find(group, "term")
        assert str(found.value) == (
            f'{folder}/term.py is not in the table of names yet: add "term": "{folder}.term:CLASS" to '
            f'BUILT_IN["{group}"] in fedfrozen_app/core/registry.py, then run `python -m '
            "fedfrozen_app.config.built_in`."
        )
    with pytest.raises(UserError, match=r"strategies/term.py is not in the table of names yet"):
        compose_config(["strategy=term"])


def test_a_file_that_inherits_a_name_which_no_method_has(tmp_path):
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "odd.yaml").write_text("defaults: [base_odd]\n")
    with pytest.raises(
        UserError, match=r"conf/strategy/odd.yaml inherits base_odd, but no strategy is called"
    ):
        compose_config([f"hydra.searchpath=[{tmp_path}]", "strategy=odd"])


def test_a_listed_method_without_a_file_says_where_to_put_it(monkeypatch):
    monkeypatch.setitem(registry.BUILT_IN["strategies"], "odd", "strategies.odd:Odd")
    sentence = "strategy=odd is in the table of names but has no file: add conf/strategy/odd.yaml with"
    with pytest.raises(UserError, match=sentence):
        check_keys(["strategy=odd"])
