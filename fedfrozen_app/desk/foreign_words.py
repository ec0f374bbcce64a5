"""Untrusted text from the server on a page: escaped, and without letters that look like others.

Control characters, right-to-left marks and zero widths become escapes, as on the terminal. Letters that look
like Latin ones (Cyrillic, Greek, full-width and the like) are followed by the name of their script.
"""

import re
import unicodedata

from markupsafe import Markup, escape

from fedfrozen_app.core.formatting import printable

MOST = 300  # characters
DIGEST = re.compile("[0-9a-f]{64}")
PLAIN = ("LATIN", "DIGIT")
NUMBER = re.compile(r"[0-9.e+-]{1,24}")  # 1e-06 is one word: a narrow window must not break it


def outside(value: object, most: int = MOST) -> Markup:
    """For a template: `{{ name | outside }}`."""
    whole = str(value)
    text = printable(stacked(whole[:most]))
    if len(whole) > most:
        text += f" (and {len(whole) - most} more characters)"
    kind = "number" if NUMBER.fullmatch(text) else "outside"
    found = Markup('<bdi class="{}">{}</bdi>').format(kind, text)
    if names := strange_scripts(text):
        found += Markup(' <small class="warn">({})</small>').format(", ".join(names))
    return found


def number(value: float) -> Markup:
    """For a template: `{{ delta | number }}`."""
    return outside(f"{value:g}")


def strange_scripts(text: str) -> list[str]:
    """The scripts of letters that are not Latin, by the first word of their Unicode names."""
    if text.isascii():
        return []
    names = {
        unicodedata.name(one, "UNKNOWN").split()[0] for one in text if one.isalnum() and not one.isascii()
    }
    return sorted(name.capitalize() for name in names if name not in PLAIN)


def stacked(text: str) -> str:
    """Escape combining marks: a stack of them would cover the lines around it."""
    text = unicodedata.normalize("NFC", text)
    return "".join(
        one.encode("unicode_escape").decode() if unicodedata.category(one)[0] == "M" else one for one in text
    )


def short(value: object) -> object:
    """The first characters of a digest, for people to compare."""
    return f"{value[:12]}…" if isinstance(value, str) and DIGEST.fullmatch(value) else value


def grouped(digits: str, size: int = 4) -> Markup:
    """A hash in groups, to be read out over the telephone."""
    parts = [digits[start : start + size] for start in range(0, len(digits), size)]
    return Markup(" ").join(Markup("<span>{}</span>").format(escape(part)) for part in parts)
