"""The verbs of the command, and the functions that carry them out."""

import difflib
import importlib
import sys
from dataclasses import fields
from pathlib import Path

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.streams import print_text
from fedfrozen_app.core.verb_table import parse

# verb: the location of its function, which takes the words after the verb. It is imported on use, because the
# imports for training take seconds.
VERBS = {
    "resume": "fedfrozen_app.commands.training:resume",
    "attach": "fedfrozen_app.commands.training:attach",
    "evaluate": "fedfrozen_app.commands.training:evaluate",
    "export": "fedfrozen_app.commands.training:export",
    "compare": "fedfrozen_app.report.compare.command:compare",
    "capsule": "fedfrozen_app.capsule.command:capsule",
    "reproduce": "fedfrozen_app.capsule.command:reproduce",
    "search": "fedfrozen_app.sweep.search:search",
    "plan": "fedfrozen_app.commands.show_plan:plan",
    "methods": "fedfrozen_app.commands.methods:methods",
    "list": "fedfrozen_app.commands.listing:list_runs",
    "show": "fedfrozen_app.commands.listing:show_run",
    "doctor": "fedfrozen_app.commands.doctor:doctor",
    "completion": "fedfrozen_app.commands.completion:completion",
    "report": "fedfrozen_app.commands.watch:report",
    "verify": "fedfrozen_app.commands.verify:verify",
    "watch": "fedfrozen_app.commands.watch:watch",
    "theory": "fedfrozen_app.theory.command:theory",
    "site": "fedfrozen_app.sites.verbs:site",
    "server": "fedfrozen_app.sites.verbs:server",
    "try-sites": "fedfrozen_app.commands.try_sites.command:try_sites",
    "provision": "fedfrozen_app.sites.provision:provision",
    "census": "fedfrozen_app.commands.census:census",
    "survival": "fedfrozen_app.commands.survival:survival",
    "audit": "fedfrozen_app.audit.command:audit",
    "calibrate": "fedfrozen_app.calibration.command:calibrate",
    "forget": "fedfrozen_app.forget.command:forget",
    "personal": "fedfrozen_app.report.personal:compare",
    "fairness": "fedfrozen_app.commands.served:fairness",
    "baselines": "fedfrozen_app.commands.baselines:baselines",
    "align": "fedfrozen_app.align.command:make",
}
TRAIN = "fedfrozen_app.commands.start:train"
OF_SITES = ("site", "server", "provision")  # verbs whose folders are kits, not runs
TAKE_SETTINGS = ("plan", "methods", "doctor")  # verbs whose words are those of training
# Verbs with their own options: mistakes in them are reported before the imports.
TAKE_OPTIONS = (
    *("census", "survival", "compare", "capsule", "reproduce", "calibrate", "forget"),
    *("fairness", "baselines", "verify", "attach"),
)


def dispatch(arguments: list[str]) -> int:
    """Carry out a command line and return the exit code: 1 when a run failed, or what the verb returns."""
    verb = arguments[0] if arguments else ""
    if verb[:1].isalpha() and verb.replace("-", "").isalpha() and verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(VERBS)}."
        raise UserError(f"'{verb}' is neither a verb nor a setting (KEY=VALUE): {hint}")
    place, rest = (VERBS[verb], arguments[1:]) if verb in VERBS else (TRAIN, arguments)
    if place == TRAIN:
        _check_dashes(rest)
    if place == TRAIN or verb in TAKE_SETTINGS:
        from fedfrozen_app.config import check_keys

        check_keys(rest)
    elif verb not in OF_SITES:
        if verb in TAKE_OPTIONS:
            parse(verb, rest)
        _check_folders(rest)
    module, _, function = place.partition(":")
    try:
        return getattr(importlib.import_module(module), function)(rest) or 0
    except RunFailed as error:
        print_text(f"fedfrozen: the run failed. {error}", sys.stderr)
        return 1


def _check_folders(rest: list[str]) -> None:
    """Check the run folders among a verb's arguments, which may be another user's."""
    folders = [Path(word) for word in rest if not word.startswith("-") and Path(word).is_dir()]
    if folders:
        from fedfrozen_app.files.plain_files import check_plain

        for folder in folders:
            check_plain(folder)


def _check_dashes(rest: list[str]) -> None:
    """Refuse --num_rounds=5, which is common elsewhere: Hydra would print its usage."""
    from fedfrozen_app.config import Config

    for word in rest:
        name, _, value = word.lstrip("-").partition("=")
        key = name.replace("-", "_")
        if word.startswith("-") and key.partition(".")[0] in {known.name for known in fields(Config)}:
            raise UserError(f"{word}: settings have no dashes before them, write {key}={value or 'VALUE'}.")
