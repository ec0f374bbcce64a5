"""Set a limit of `policy.yaml`, for the command line and the desk alike.

The rest of the file is kept, comments included. The new file is parsed as the site parses it before it
replaces the old one, and the change is in the record of decisions before it takes effect.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.sites import files
from fedfrozen_app.sites.approval import account_name
from fedfrozen_app.sites.decide import decision_log
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy

# Only numbers and single words: lists of names, and downloads, are edited by hand, with a second look.
LIMITS = (
    *("max_epsilon", "max_delta", "min_examples", "min_people", "min_cohort", "min_threshold"),
    *("rounds_per_day", "hellos_per_day", "judgements_per_day", "censuses_per_day", "refusals_per_day"),
    *("survival_answers_per_day", "census_floor", "max_tokens", "approval", "privacy_required", "monitoring"),
    "secure_aggregation",
)
WORD = re.compile(r"[0-9A-Za-z.+-]{1,30}")


def limit(arguments: list[str]) -> None:
    """`fedfrozen site limit KEY VALUE [KIT]`."""
    given = parse("site limit", arguments)
    before, after = set_limit(Kit.read(given.kit), given.key, given.value)
    print(f"{given.key} was {before}, and is {after} from the next message on.")


def set_limit(kit: Kit, key: str, word: str) -> tuple[Any, Any]:
    """Returns (old value, new value)."""
    if key not in LIMITS:
        raise UserError(
            f"{key} is no limit that can be set so: use {', '.join(LIMITS)}, or edit {kit.policy}."
        )
    if not WORD.fullmatch(word):
        raise UserError(f"{key} must be a number or a word, not {word!r}.")
    with decision_log(kit) as log:  # one at a time: two changes at once would lose one
        old = Policy.read(kit.policy)
        before, after = getattr(old, key), _value(word)
        before_text = kit.policy.read_text("utf-8")
        if before_text.lstrip().startswith("{"):
            raise UserError(f"{kit.policy} is one mapping in braces: change it in an editor.")
        text = _changed(before_text, key, after)
        _check(kit.policy, text, old, key, after)
        log.write("limit", key=key, before=before, after=after, by=account_name())
        files.write(kit.policy, text.encode(), kit.policy.stat().st_mode & 0o777)
    return before, after


def _value(word: str) -> Any:
    """Parse as YAML does, but read 1e-6 as a number too."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return yaml.safe_load(word)


def _changed(text: str, key: str, value: Any) -> str:
    """The file's text with this one value replaced."""
    new = yaml.safe_dump({key: value}).strip()
    line = re.compile(rf"^{key}:[^\n#]*?(?P<rest>[ \t]*(#[^\n]*)?)$", re.MULTILINE)
    if line.search(text):
        return line.sub(lambda found: new + found["rest"], text, count=1)
    return text.rstrip("\n") + f"\n{new}\n"


def _check(path: Path, text: str, old: Policy, key: str, value: Any) -> None:
    """`UserError` if the new file cannot be read, or would change any other value."""
    part = path.with_name(f".{path.name}.new")
    try:
        files.write(part, text.encode(), files.SECRET)
        try:
            found = asdict(Policy.read(part))
        except UserError as error:
            raise UserError(str(error).replace(str(part), str(path))) from None
    finally:
        part.unlink(missing_ok=True)
    if found != asdict(old) | {key: value}:
        raise UserError(f"{path} says {key} in a way that only an editor can change: change it there.")
