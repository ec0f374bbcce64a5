"""The pages say what the code does: their commands compose, their code runs, their tables are complete."""

import importlib.util
import re
import shlex
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import fedfrozen
from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands import VERBS, reference
from fedfrozen_app.commands.api import api_page
from fedfrozen_app.config import Config, compose_config, docs, read, resolved
from fedfrozen_app.config.schema import NAMED, sections
from fedfrozen_app.config.settings import about
from fedfrozen_app.config.sources import base
from fedfrozen_app.core import registry
from fedfrozen_app.core.conf_files import conf_dir
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.theory import command as theory
from strategies.fedfrozen import SCOPES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
README, CONFIGURATION = ((ROOT / name).read_text() for name in ("README.md", "docs/configuration.md"))


def blocks(page, *languages):
    """The fenced blocks in these languages."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for found, text in fenced if found in languages]


def lines(page):
    return [line for block in blocks(page, "", "bash") for line in block.splitlines()]


def commands(page):
    return [shlex.split(line, comments=True)[1:] for line in lines(page) if line.startswith("fedfrozen ")]


# The commands of these pages need the files that the pages write: see test_adding.py.
FIRST = {"README.md", "tutorial.md", "guide.md", "deployment.md"}  # all of theirs; of others every second
COMMANDS = [
    pytest.param(
        list(words),
        id=f"{page}: {' '.join(words)}",
        marks=[pytest.mark.slow] if page not in FIRST and number % 2 else [],
    )
    for number, (words, page) in enumerate(
        {  # each once, on the last page that has it
            tuple(words): page.name
            for page in PAGES
            if page.name not in ("adding-a-strategy.md", "client-steps.md")
            for words in commands(page.read_text())
        }.items()
    )
]
FLOWER_RUNS = [line for line in lines((ROOT / "docs/flower.md").read_text()) if line.startswith("flwr run ")]


# Commands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_is_understood(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    verb = words[0] if words[0] in VERBS else ""
    if verb in ("plan", "doctor") or words[:2] == ["site", "request"]:
        assert command(words) == 0
    elif verb == "theory":
        assert all(theory.read(composed).study in theory.STUDIES for composed in laboratory(words[1:]))
    elif "--help" in words:
        assert command(words) == 0
    elif verb == "try-sites":  # carried out in tests/commands/test_try_sites.py
        assert parse(verb, words[1:])
    elif verb == "methods":  # takes as long as all methods together, and is run in tests/commands
        read(resolved(compose_config(words[1:])))
    elif verb in ("", "search"):
        for overrides in expanded([word for word in words if "=" in word and "interval" not in word]):
            read(resolved(compose_config([with_real_path(word, tmp_path) for word in overrides])))
    else:
        if words[:2] in (["site", "node"], ["site", "exec"]):
            words = [*words, "--unguarded"]  # what the watchdog would start in another process
        assert command(words) == 2  # RUN stands for a folder: that it is not there is all that is wrong
        said = capsys.readouterr().err
        assert re.search(
            "There is no |does not exist|cannot be read|is no (site|server)'s kit|has no key", said
        )


def laboratory(words):
    """The configurations that these words of `fedfrozen theory` compose to."""
    for overrides in expanded([word for word in words if word != "-m"]):
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(conf_dir()), version_base=None):
            yield hydra.compose("theory", overrides=overrides)


PFEDDC = (ROOT / "docs/pfeddc.md").read_text()


@pytest.mark.parametrize(
    "words", [shlex.split(line)[1:] for line in lines(PFEDDC) if line.startswith("fedfrozen ")], ids=" ".join
)
def test_a_command_of_the_prompts_page_composes(words, tmp_path, capsys):
    if words[0] == "personal":
        assert command(words) == 2 and "There is no run folder RUN" in capsys.readouterr().err
    elif words[0] == "align":
        assert command([with_real_path(word, tmp_path) for word in words]) == 2
        assert "No .parquet file found" in capsys.readouterr().err  # the words are right, the folders empty
    else:
        read(resolved(compose_config([with_real_path(word, tmp_path) for word in words])))


def test_the_two_first_commands():
    assert lines(README)[:2] == ["pip install -e . && fedfrozen", 'pip install -e ".[dev]" && pytest']
    assert len(COMMANDS) > 120 and len(FLOWER_RUNS) == 2  # the search above still finds them
    assert len(README.splitlines()) < 130
    assert {words[0] for page in PAGES for words in commands(page.read_text())} >= VERBS.keys() - {
        "completion"
    }


def test_from_nothing_to_a_comparison_in_five_commands():
    first = blocks(README, "bash")[0].splitlines()
    assert len(first) == 5
    assert first[0].startswith("pip install") and first[1] == "fedfrozen"
    assert [line.split()[1] for line in first[2:]] == ["-m", "compare", "watch"]
    folders = {
        shlex.split(first[2])[-1].removeprefix("output_dir="),
        *(line.split()[2] for line in first[3:]),
    }
    assert len(folders) == 1


def test_the_page_of_flower_begins_with_the_quick_way_and_warns_of_the_other():
    page = (ROOT / "docs/flower.md").read_text()
    quick, plain = page.index("\nfedfrozen runtime=flower"), page.index("\nflwr run .")
    told = page[quick:plain]
    assert "6 min 52 s" in told and "5.4 GB" in told and "goes on running" in told
    stop = page[plain:].partition("\n## ")[0]
    assert "stops it" in stop and "CPU wheels of torch alone" in stop
    assert "Every SuperNode on one machine needs its own `--port`" in page


@pytest.mark.parametrize("line", FLOWER_RUNS)
def test_overrides_of_flwr_run_compose(line, tmp_path):
    (overrides,) = re.findall(r"overrides=\"(.*?)\"", line)
    words = [word.replace("/server/folder", str(tmp_path)) for word in shlex.split(overrides)]
    read(resolved(compose_config(words)))


def test_bad_input_reads_as_the_readme_shows(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = [line for line in lines(README) if line.startswith(("$ fedfrozen ", "fedfrozen: "))]
    assert len(shown) >= 4
    for call, answer in zip(shown[::2], shown[1::2], strict=True):
        assert command(shlex.split(call)[2:]) == 2
        assert answer in capsys.readouterr().err


def expanded(words):
    """Overrides in which every value of a sweep occurs; the words themselves where nothing is swept."""
    parsed = OverridesParser.create().parse_overrides(words)
    choices = [
        [f"{word.key_or_group}={value}" for value in word.sweep_string_iterator()]
        if word.is_sweep_override()
        else [word.input_line]
        for word in parsed
    ]
    longest = max(len(values) for values in choices)
    return [[values[min(n, len(values) - 1)] for values in choices] for n in range(longest)]


def with_real_path(word, folder):
    """DIR, FILE and RUN are the reader's, and ana a kit that the page makes: folders take their place."""
    key, _, value = word.partition("=")
    if not re.fullmatch(r"(DIR|FILE|RUN|ana)(/.*)?", value):
        return word
    (folder / value).mkdir(parents=True, exist_ok=True)
    return f"{key}={folder / value}"


# Links ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), target
            if anchor:
                titles = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
                assert anchor in [title.lower().replace(" ", "-") for title in titles]
    for path in re.findall(r"`((?:fedfrozen_app|strategies|clients|conf|tests|benchmarks)/[\w/.]*)`", text):
        new = re.search(rf"^# {re.escape(path)}$", text, re.MULTILINE)  # a file that the page tells to write
        assert new or (ROOT / path).exists(), path


GENERATED = ("configuration.md", "commands.md", "python-api.md", "combinations.md")


def test_no_page_that_is_written_by_hand_is_long():
    """People finish a page of 1,500 words; what is longer is generated, or two pages. Most are shorter."""
    words = {
        page.name: len(page.read_text().split())
        for page in PAGES
        if page.name not in GENERATED and "appendix" not in page.parts
    }
    assert {name: count for name, count in words.items() if count > 1500} == {}
    assert len(words) > 40 and sum(words.values()) < 900 * len(words)


def test_pictures_are_small():
    assert all(picture.stat().st_size < 200_000 for picture in (ROOT / "docs").glob("*.png"))


def test_the_picture_of_the_rooms_has_every_room_of_the_contract():
    place = ROOT / "docs/figures/pictures.py"
    spec = importlib.util.spec_from_file_location("pictures", place)
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    drawn = [room for _, _, rooms in pictures.GROUPS for room in rooms]
    assert drawn == [room for line in pictures.layers() for room in line]  # in its order too


# The table of keys ----------------------------------------------------------------------------------------


def schema_keys(node=Config, prefix=""):
    for field in fields(node):
        name = prefix + ("from" if field.name == "start_from" else field.name)
        inner = field.default_factory if is_dataclass(field.default_factory) else None
        if inner:
            yield from schema_keys(inner, f"{name}.")
        elif name not in NAMED:  # whose keys are those of what is named
            yield name
    if not prefix:
        for group, kind in NAMED.items():
            yield f"{group}.name"
            yield from {f"{group}.{field.name}" for cls in named(kind) for field in fields(cls.Settings)}


def named(kind):
    return [registry.find(kind, name) for name in registry.BUILT_IN[kind]]


def rows(page):
    """key -> default, of the tables whose rows are `| `key` | `default` | meaning |`."""
    return dict(re.findall(r"^\| `([\w.]+)` \| (?:`([^`]*)`|[\w ]+) \| .", page, re.MULTILINE))


def as_written(value):
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def test_the_page_is_the_one_that_the_settings_make():
    assert docs.page() == CONFIGURATION, "run `python -m fedfrozen_app.config.docs`"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse writes options otherwise there")
def test_the_page_of_commands_is_the_one_that_the_table_makes():
    told = (ROOT / "docs/commands.md").read_text()
    assert reference.page() == told, "run `python -m fedfrozen_app.commands.reference`"


def test_the_page_of_the_python_api_is_the_one_that_the_source_makes():
    told = (ROOT / "docs/python-api.md").read_text()
    assert api_page.page() == told, "run `python -m fedfrozen_app.commands.api.api_page`"
    assert sorted(re.findall(r"^### (\w+)$", told, re.M)) == sorted(fedfrozen.__all__)


def test_every_setting_has_its_sentence():
    for section in (*sections().values(), *(cls.Settings for kind in NAMED.values() for cls in named(kind))):
        assert all(about(field).meaning for field in fields(section))


def test_every_key_is_explained_and_no_other():
    assert set(rows(CONFIGURATION)) == set(schema_keys())


def test_every_default_is_the_one_that_composes():
    """Of what has a name, that of the base which its file inherits; a table tells what files change."""
    usual = compose_config([])
    bases = [
        (group, base(f"{group}/base_{name}"))
        for group, kind in NAMED.items()
        for name in (usual[group].name, *registry.BUILT_IN[kind])
    ]
    for key, told in rows(CONFIGURATION).items():
        if key == "model.config":
            continue
        group, _, own = key.partition(".")
        found = [keys[own] for named_group, keys in bases if named_group == group and own in keys]
        assert told == as_written(found[0] if found else OmegaConf.select(usual, key)), key


@pytest.mark.slow
def test_what_the_other_files_set():
    table = re.findall(r"^\| `(\w+=\w+)` \| ((?:`[\w.]+=[^`]+` ?)+)\|$", CONFIGURATION, re.MULTILINE)
    assert len(table) >= 8
    for choice, cell in table:
        composed = compose_config([choice])
        for key, told in re.findall(r"`([\w.]+)=([^`]+)`", cell):
            assert told == as_written(OmegaConf.select(composed, key)), (choice, key)


def test_freeze_scopes_are_all_explained():
    assert all(f"| `{scope}` |" in CONFIGURATION for scope in SCOPES)
