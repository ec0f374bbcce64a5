"""What the command says of itself: whole, true, and without importing what training needs."""

import re
import subprocess
import sys
from dataclasses import fields

import pytest

from fedfrozen_app.__main__ import run
from fedfrozen_app.commands import VERBS as PLACES
from fedfrozen_app.commands.help_page import help_page, requested_text
from fedfrozen_app.commands.training import what_was_brought
from fedfrozen_app.config import built_in, check_keys, compose_config
from fedfrozen_app.core import conf_files, registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.verb_table import GROUPS, VERBS, parser
from fedfrozen_app.sites.verbs import SERVER_WORDS, WORDS

HEAVY = {"torch", "transformers", "datasets", "flwr", "ray", "matplotlib", "scipy", "sklearn", "numpy"}
HEAVY |= {"hydra", "omegaconf"}  # half a second on a slow core
LINES = ["--help", "--version", "plan --help", "site check --help", "completion bash", "lst", "num_round=5"]
LINES += ["strategy=fedprox strategy.nu=1", "strategy=fedfrozn", "-m num_round=5,6", "plan num_round=5"]
LINES += ["-m strategy=fedavg,fedfrozn", "plan strategy=fedfrozn", "--num_rounds=5"]


def test_nothing_heavy_is_imported_to_say_a_word():
    """All in one process: what any of them imports is seen."""
    code = f"""
import sys
from fedfrozen_app.__main__ import run
for line in {LINES!r}:
    run(line.split())
print(*({HEAVY!r} & set(sys.modules)), file=sys.stderr)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "", done.stderr
    assert "fedfrozen: There is no key 'strategy.nu' in this configuration: did you mean" in done.stderr


def test_the_page_names_every_verb_and_every_choice():
    page = help_page()
    for verb in PLACES:
        assert re.search(rf"^  {verb} ", page, re.M), verb
    for group, names in conf_files.choices().items():
        for name in (group, *names):
            assert re.search(rf"\b{name}\b", page), name
    assert "powered by Hydra" not in page
    assert re.search(r"strategy +fedfrozen ", page)  # the default first


def test_every_verb_and_every_word_of_one_is_told_once():
    told = [verb for verbs in GROUPS.values() for verb in verbs]
    assert sorted(told) == sorted(PLACES)
    words = {*PLACES, *(f"site {word}" for word in WORDS), *(f"server {word}" for word in SERVER_WORDS)}
    assert words | {"provision init", "provision sign", "provision rotate"} == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_help_with_examples_of_its_own(verb, capsys):
    assert run([*verb.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: fedfrozen {verb}")
    examples = said.partition("examples:\n")[2]
    assert f"fedfrozen {verb}" in examples
    assert max(map(len, said.splitlines())) <= 130


def test_a_folder_named_like_a_flag_is_no_question():
    assert requested_text(["export", "run"]) is None
    assert requested_text(["strategy=fedavg"]) is None
    assert requested_text(["-h"]) == help_page()


def test_versions_are_ours(capsys):
    assert run(["--version"]) == 0
    assert re.fullmatch(r"fedfrozen \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("strategy=fedfrozn", "Unknown strategy 'fedfrozn': choose one of apfl, "),
        ("-m strategy=fedavg,fedfrozn", "Unknown strategy 'fedfrozn': choose one of apfl, "),
        ("-m num_round=5,6", "There is no key 'num_round' in this configuration: did you mean num_rounds?"),
        # For Hydra to judge: a list without -m, files from elsewhere, no name, Hydra's own groups.
        ("strategy=fedavg,fedfrozn", ""),
        ("hydra.searchpath=[pkg://mine] strategy=mine", ""),
        ("strategy=null", ""),
        ("hydra/launcher=joblib", ""),
        ("-m strategy=choice(fedavg,fedprox)", ""),
        ("-m model=vit_tiny,linear seed=1,2", ""),
    ],
)
def test_a_name_that_no_file_has_is_refused_before_hydra_is_asked(words, wrong):
    if not wrong:
        check_keys(words.split())
        return
    with pytest.raises(UserError, match=re.escape(wrong)):
        check_keys(words.split())


def test_what_this_process_has_added_is_a_name(monkeypatch):
    monkeypatch.setitem(registry.REGISTERED, ("strategies", "mine"), registry.find("strategies", "fedavg"))
    check_keys(["strategy=mine"])
    with pytest.raises(UserError, match="Unknown server_optimizer 'mine'"):
        check_keys(["server_optimizer=mine"])


@pytest.mark.parametrize("group", ["strategies", "server_optimizers"])
def test_settings_in_the_table_are_those_of_the_class(group):
    for name in registry.BUILT_IN[group]:
        made = registry.find(group, name).Settings()
        assert registry.DECLARED[group][name]["settings"] == {
            one.name: getattr(made, one.name) for one in fields(made)
        }


def test_the_table_of_built_in_methods_is_current():
    found = built_in.TABLE.read_text(encoding="utf-8")
    assert built_in.table_source() == found, "run `python -m fedfrozen_app.config.built_in`"


def test_a_table_that_is_not_current_gives_a_sentence(monkeypatch, capsys):
    monkeypatch.setitem(registry.DECLARED["strategies"]["fedprox"]["settings"], "mu", 7.0)
    assert run(["plan", "strategy=fedprox"]) == 2
    assert "fedfrozen: The settings of strategy 'fedprox' have changed: run" in capsys.readouterr().err


def test_what_the_table_lacks_is_imported(monkeypatch, tmp_path):
    (tmp_path / "worked_out.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Settings:\n    size: int = 2 ** 3\n"
        "class Method:\n    Settings = Settings\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.BUILT_IN["strategies"], "worked_out", "worked_out:Method")
    registry.places.cache_clear()
    try:
        assert registry.settings_of("strategies", "worked_out") == {"size": 8}
    finally:
        registry.places.cache_clear()


def test_a_search_takes_settings_on_either_side_of_its_flags():
    given, unknown = parser("search").parse_known_intermixed_args(["a=1", "--trials", "3", "b=2"])
    assert (given.overrides, given.trials, unknown) == (["a=1", "b=2"], 3, [])


@pytest.mark.parametrize(
    ("words", "model", "said"),
    [
        ("dataset=synthetic_clinical strategy=fedavg", "bert_small", "model=bert_small"),
        ("strategy=safl", "bert_small", "model=bert_small and dataset=synthetic_clinical"),
        ("strategy=safl dataset=digits", "vit_mini", ""),
        ("dataset=synthetic_clinical model=bert_tiny", "bert_tiny", ""),
        ("seed=3", "vit_mini", ""),
    ],
)
def test_data_bring_a_model_that_can_read_them_and_the_run_says_so(words, model, said):
    composed = compose_config(words, hydra=True)
    line = what_was_brought(composed.hydra.runtime.choices, words.split())
    assert composed.model.name == model
    assert (f"Using {said}, which" in line) if said else not line
