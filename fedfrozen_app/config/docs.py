"""`python -m fedfrozen_app.config.docs` writes docs/configuration.md from the dataclasses and `conf/`.

The page's prose is `TEMPLATE`; what is in braces is generated. A test fails when the page is not current.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedfrozen_app.config.compose import compose_config
from fedfrozen_app.config.schema import GROUPS, NAMED, Config, defaults, key_of, sections
from fedfrozen_app.config.settings import About, about
from fedfrozen_app.config.sources import base
from fedfrozen_app.core import registry
from fedfrozen_app.core.conf_files import conf_dir

PAGE = conf_dir().parent / "docs" / "configuration.md"
TEMPLATE = """\
# Configuration

<!-- Written by `python -m fedfrozen_app.config.docs`: change the settings or that file, and run it again. -->

Settings live in `conf/`: one folder for each concern, composed by [Hydra](https://hydra.cc/docs/1.3/intro/).

- Choose a file of a group: `strategy=fedavg`.
- Set a key: `num_rounds=10`.
- Print what a command line resolves to: `fedfrozen --cfg job strategy=fedprox`.
- Start from a whole run in one file: `experiment=digits_skewed`. The files are in `conf/experiment/`; each
  opens with its own command.

The tables give every key with the value it has when nothing is set. `null` means "not set".
A wrong key or value ends the command at once, with one sentence and exit code 2.

So does a key without effect: `privacy.epsilon=8` alone is refused, because `privacy=none` would ignore it.
Add `privacy=dp_sgd`. In a sweep over both, mark the key with `++`:
`fedfrozen -m privacy=none,dp_sgd ++privacy.epsilon=8`.

Every default, bound and sentence below is declared at its field in `fedfrozen_app/config/schema/`, or in a
strategy's `Settings`. A file of a group inherits them (`defaults: [base]`) and sets only what it changes.

## The run

{root}

## Strategy

{strategy_files}

The keys depend on the file.

{strategy}

| `strategy.freeze_scope` | frozen after the warm-up |
|---|---|
| `qk` | queries and keys, with their biases, in every layer |
| `qk+ln1` | those, and the norm whose output they read |
| `train_value_only` | everything but the values and the head |
| `v` | the values instead of the kernel (ablation) |
| `random` | as many attention matrices as the kernel has, drawn by the seed (ablation) |

## Server optimiser

How the mean update becomes the next model; for every strategy.

{server_optimizer_files}

{server_optimizer}

## Model

{model_files}

{model}

## Adapter

{adapter_files}

[Adapters](adapters.md) explains the rules, and what goes together.

{adapter}

## Dataset

{dataset_files}

[Clinical text](data-text.md) explains those for texts.

{dataset}

## Partition

{partition_files}

{partition}

## Client

{client_files}

Every client starts each round with a fresh optimiser.

{client}

## Privacy

{privacy_files}

[Privacy](privacy.md) explains what epsilon covers and what it does not.

{privacy}

## Aggregation

{aggregation_files}

The last three hold a round's replies in memory. Each name is combined over the clients that sent it, so
frozen and private parts are left alone.

{aggregation}

## Secure aggregation

{secure_aggregation_files}

[Secure aggregation](secure-aggregation.md) explains who learns what, and what it costs.

{secure_aggregation}

## Codec

{codec_files}

[Codecs](codecs.md) explains what each does to an update, and what goes together.

{codec}

## Runtime

{runtime_files}

[Real sites](deployment.md) explains `deployed`, [Several cores, GPUs or machines](several-machines.md) `ray`.

{runtime}

## Clock

{clock_files}

[Virtual time](virtual-time.md) explains how a round's time is computed.

{clock}

## Pacing

{pacing_files}

[Pacing](pacing.md) explains which replies count, and how much.

{pacing}

## Experiments

{experiment_files}

## To find out what is wrong

{debug_files}

## What the files set

Beside what a file inherits, and what the files that it chooses set.

{differences}
"""


def page() -> str:
    usual = compose_config([])
    parts = {group: table(_rows(sections()[group], usual[group], f"{group}.")) for group in GROUPS}
    parts["root"] = table(_root_rows(usual))
    for group in NAMED:
        parts[group] = table(_named_rows(group))
    for group in (*GROUPS, "strategy", "server_optimizer", "experiment", "debug"):
        parts[f"{group}_files"] = _files(group)
    parts["differences"] = _differences()
    for name, text in parts.items():
        assert f"{{{name}}}" in TEMPLATE, name
        parts[name] = text.rstrip("\n")
    return TEMPLATE.format(**parts)


def table(rows: Iterator[tuple[str, Any, About]]) -> str:
    lines = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for key, default, known in rows:
        lines.append(f"| `{key}` | {_default(default)} | {_values(known, default)} | {known.meaning} |")
    return "\n".join(lines)


def _root_rows(usual: DictConfig) -> Iterator[tuple[str, Any, About]]:
    for found in fields(Config):
        key = key_of(found.name)
        if found.metadata:
            yield key, usual[key], about(found)
        elif key in sections() and key not in GROUPS:
            yield from _rows(sections()[key], usual[key], f"{key}.")


def _rows(kind: type, composed: DictConfig, prefix: str) -> Iterator[tuple[str, Any, About]]:
    """The keys of a section, with the values that the default file leaves them."""
    for found in fields(kind):
        yield prefix + found.name, composed[found.name], about(found)


def _named_rows(group: str) -> Iterator[tuple[str, Any, About]]:
    """Each key once, though several of the group's have it; the first gives the default."""
    yield f"{group}.name", compose_config([])[group].name, About("Set by the file")
    seen: dict[str, tuple[Any, About]] = {}
    owners: dict[str, dict[tuple[str, str], list[str]]] = {}  # by key, then by default and meaning
    for owner in registry.BUILT_IN[NAMED[group]]:
        settings = registry.find(NAMED[group], owner).Settings
        for found in fields(settings):
            own_default = defaults(settings)[found.name]
            seen.setdefault(found.name, (own_default, about(found)))
            alike = (_default(own_default), about(found).meaning)
            owners.setdefault(found.name, {}).setdefault(alike, []).append(f"`{owner}`")
    for name, (default, known) in seen.items():
        meanings = [
            f"{', '.join(who)}{f' ({own})' if own != _default(default) else ''}: {meaning}"
            for (own, meaning), who in owners[name].items()
        ]
        yield f"{group}.{name}", default, replace(known, meaning=". ".join(meanings))


def _default(value: Any) -> str:
    if isinstance(value, DictConfig) and value:
        return "see the file"
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    return f"`{text}`"


def _values(known: About, default: Any) -> str:
    if known.choices:
        return ", ".join(f"`{choice}`" for choice in known.choices)
    if isinstance(default, bool):
        return "`true`, `false`"
    return ", ".join(known.bounds)


def _files(group: str) -> str:
    """A group's files: the sentence that each opens with, and the files of other groups that it chooses."""
    usual = dict(_chosen(conf_dir() / "config.yaml")).get(group)
    lines = ["| file | |", "|---|---|"]
    for path in sorted(_paths(group), key=lambda path: path.stem != usual):  # the default first
        chosen = [f"`{other}={name}`" for other, name in _chosen(path)]
        brings = f" Chooses {', '.join(chosen)}." if chosen else ""
        default = " The default." if path.stem == usual else ""
        text = _opening(path)
        if group == "strategy":  # its class describes it
            what, paper = registry.described("strategies", path.stem)
            cited = f" {paper[:1].upper()}{paper[1:]}." if paper else ""
            text = f"{what}{cited} {text}".rstrip()
        lines.append(f"| `{group}={path.stem}` | {text}{default}{brings} |")
    return "\n".join(lines)


def _differences() -> str:
    """What each file sets, out of the file itself."""
    lines = ["| file | sets |", "|---|---|"]
    for group in ("strategy", *GROUPS, "experiment", "debug"):
        for path in _paths(group):
            whole = "@package _global_" in path.read_text()
            inherited = {} if whole else base(f"{group}/base") or base(f"{group}/base_{path.stem}") or {}
            difference = {
                key: value for key, value in _load(path).items() if inherited.get(key, "absent") != value
            }
            cells = [f"`{key}={value}`" for key, value in _leaves(difference, "" if whole else f"{group}.")]
            if cells:
                lines.append(f"| `{group}={path.stem}` | {' '.join(cells)} |")
    return "\n".join(lines)


def _leaves(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        if key == "defaults" or (key == "name" and prefix != "model."):
            continue
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value not in (None, "???"):
            yield prefix + key, str(value).lower() if isinstance(value, bool) else str(value)


def _paths(group: str) -> list[Path]:
    return sorted((conf_dir() / group).glob("*.yaml"))


def _load(path: Path) -> dict[str, Any]:
    """As Hydra reads it: 1.0e-3 is a number there."""
    loaded = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


def _chosen(path: Path) -> Iterator[tuple[str, str]]:
    """The groups that a file chooses a file of, and which."""
    for entry in _load(path).get("defaults", ()):
        if isinstance(entry, dict):
            for key, value in entry.items():
                yield str(key).removeprefix("override ").removeprefix("/"), str(value)


def _opening(path: Path) -> str:
    """The comment that a file begins with, as one sentence."""
    words = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith(("# @package", "# fedfrozen ")):
            words.append(line.removeprefix("#").partition("   ")[0].strip())
    return " ".join(words).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
