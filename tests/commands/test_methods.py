"""`fedfrozen methods`, what strategies say of themselves, and the table of what goes with what."""

import json
import subprocess
import sys

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands import combinations
from fedfrozen_app.commands.combinations import WORKS, columns, combination
from fedfrozen_app.commands.methods import in_words
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from tests.conftest import SMALL

MODEL = {"query": 4, "key": 4, "mlp": 8, "head": 2}
ROWS = [word for word in SMALL if not word.startswith("model.config")]


def listed(capsys, *words):
    assert command(["methods", "--json", *words]) == 0
    return {method["name"]: method for method in json.loads(capsys.readouterr().out)}


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.mark.slow
def test_a_line_for_every_strategy(capsys):
    found = listed(capsys, "num_rounds=10")
    assert list(found) == registry.names("strategies")
    assert not [method["problem"] for method in found.values() if method["problem"]]
    fedavg, whole = found["fedavg"], found["fedavg"]["up"]
    assert (fedavg["trains"], fedavg["down"], fedavg["kept"]) == ("all", whole, "")
    assert (found["local"]["up"], found["local"]["kept"]) == (0, "client: all")
    assert found["fedper"]["kept"] == "client: head" and found["fedper"]["up"] < whole
    assert found["private_attention"]["kept"] == "client: query, key, value"
    assert found["fedfrozen"]["trains"] == "warmup: all; frozen: all but query, key"
    assert found["fedbabu"]["trains"] == "all but head"
    assert found["fedpart"]["trains"].endswith("then stem, layer.0, layer.1 in turn")  # of ten rounds
    assert found["ditto"]["kept"].startswith("client: v (") and "alpha (a number)" in found["apfl"]["kept"]
    assert all(found[name]["up"] == whole for name in ("ditto", "apfl", "fedprox"))  # nothing of v travels
    assert "each client its own layers" in found["safl"]["trains"]


@pytest.mark.slow
def test_for_the_model_that_is_asked_for(capsys):
    found = listed(capsys, "model=linear", "num_rounds=2")
    assert "no attention kernel" in found["fedfrozen"]["problem"]
    assert found["fedavg"]["up"] == (64 * 10 + 10) * 4
    assert command(["methods", "model=linear", "num_rounds=2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(found) + 2  # a line each, the headings, and what the figures are


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (MODEL, "all"),
        ({"query": 4, "key": 4, "mlp": 8}, "all but head"),
        ({"head": 2}, "head"),
        ({"head": 2, "mlp": 3, "key": 1}, "head; part of key, mlp"),
        ({}, "nothing"),
    ],
)
def test_roles_in_words(part, words):
    assert in_words(part, MODEL) == words


def test_lines_for_the_strategies_that_are_named(capsys):
    assert command(["methods", "strategy=fedprox,fedavg", "--json"]) == 0
    assert [line["name"] for line in json.loads(capsys.readouterr().out)] == ["fedprox", "fedavg"]


def test_bad_words_are_refused_once(capsys):
    assert command(["methods", "strategy.mu=1"]) == 2
    assert "leave strategy.mu=1 out" in capsys.readouterr().err
    assert command(["methods", "strategy=fedavg,fedproxy"]) == 2
    assert capsys.readouterr().err.count("did you mean fedprox?") == 1
    assert command(["methods", "num_rounds=-1"]) == 2
    assert capsys.readouterr().err.count("num_rounds") == 1


def test_every_strategy_says_what_it_does_and_whose_it_is():
    for name in registry.BUILT_IN["strategies"]:
        says, paper = registry.described("strategies", name)
        cls = registry.find("strategies", name)
        assert says == cls.__doc__.partition("\n")[0] and says.endswith("."), name
        assert paper == cls.paper, name
        assert paper or name in ("local", "schedule"), name


def test_help_lists_them_without_torch():
    code = "import sys\nfrom fedfrozen_app.__main__ import run\nrun(['--help'])\n"
    code += "assert 'torch' not in sys.modules"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {*registry.BUILT_IN["strategies"]} <= {*said.split()}


def test_another_package_s_strategy_is_described_too(monkeypatch):
    class Theirs:
        """Does nothing, slowly.

        And more.
        """

    monkeypatch.setitem(registry.REGISTERED, ("strategies", "theirs"), Theirs)
    assert registry.described("strategies", "theirs") == ("Does nothing, slowly.", "")


@pytest.mark.slow
def test_the_page_of_combinations_is_what_the_code_says():
    assert combinations.PAGE.read_text(encoding="utf-8") == combinations.page()


SIZES = {"safl": 3}  # layers: one of them is chosen
PROMPTS = ("pfeddc", "fedpgp", "fedotp", "pfedmoap")  # of a model with two towers, which they bring


@pytest.mark.slow
@pytest.mark.parametrize("column", [c for c in columns() if c.title != "deployed"], ids=lambda c: c.words[0])
@pytest.mark.parametrize("name", list(registry.BUILT_IN["strategies"]))
def test_what_is_said_to_work_works_and_the_rest_is_refused(train, known, caplog, name, column):
    """Two tiny rounds each. Four clients: as many as krum needs, and one more."""
    said = combination(name, column, known)
    small = [*ROWS, "num_clients=4", "num_rounds=2", "eval_every=2"]
    if name not in PROMPTS:
        layers = SIZES.get(name, 2)
        small += [word for word in SMALL if word.startswith("model.config")]
        small += [f"model.config.num_hidden_layers={layers}"]
    words = [*small, f"strategy={name}", *column.words]
    if column.title == "DP-SGD":
        words += ["privacy.epsilon=50", "privacy.seeded_noise=true"]
    if said == WORKS or column.title == "cohort runner":
        with caplog.at_level("INFO"):
            found = train(*words, small=False)
        assert found.summary["status"] == "completed" and found.summary["clients_failed"] == 0
        if column.title == "cohort runner":
            assert ("train one by one" in caplog.text) == (said != WORKS)
    else:
        with pytest.raises(UserError) as refused:
            train(*words, small=False)
        assert str(refused.value) == said
