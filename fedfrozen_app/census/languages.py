"""The language and script of a text, and whether it was read in the wrong encoding, by simple rules."""

import re
import unicodedata

# The most frequent words that occur in no other language of the list.
STOP_WORDS = {
    "en": "the and of with was for that is this patient at from",
    "de": "der und ist nicht mit von den das ein wurde bei auf",
    "fr": "les des est une dans pour avec sur qui pas patiente chez",
    "es": "el los las una con por para del se paciente fue y",
    "it": "il gli che della con per una sono nel alla paziente di",
    "nl": "het een van niet met voor bij zijn werd naar ook op",
    "pt": "os uma com para não do da em foi ao pela são",
}
LANGUAGES = (*STOP_WORDS, "unsure")
SCRIPTS = ("ascii", "latin", "greek", "cyrillic", "arabic", "hebrew", "asian", "other")
# What UTF-8 looks like when it was read as Latin-1, and the mark of characters that could not be read.
MISREAD = re.compile("�|Ã[\x80-¿]|â€|Â[\x80-¿]")
_FOR = {word: language for language, text in STOP_WORDS.items() for word in text.split()}
_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL")
BEGINNING = 5000  # characters that are examined


def language(text: str) -> str:
    """The language with the most frequent words in the text, if there are at least two."""
    votes: dict[str, int] = {}
    for word in re.findall(r"[^\W\d_]+", text[:BEGINNING].lower()):
        if word in _FOR:
            votes[_FOR[word]] = votes.get(_FOR[word], 0) + 1
    ranked = sorted(votes.items(), key=lambda item: -item[1])
    if not ranked or ranked[0][1] < 2 or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return "unsure"
    return ranked[0][0]


def script(text: str) -> str:
    """The script of most non-ASCII letters; "latin" if they are accented letters among ASCII."""
    if text.isascii():
        return "ascii"
    found: dict[str, int] = {}
    for letter in text[:BEGINNING]:
        if not letter.isascii() and letter.isalpha():
            kind = unicodedata.name(letter, "OTHER").split()[0]
            kind = "asian" if kind in _ASIAN else kind.lower()
            found[kind] = found.get(kind, 0) + 1
    if not found:
        return "latin"
    top = max(found, key=lambda kind: (found[kind], kind))
    return top if top in SCRIPTS else "other"


def misread(text: str) -> bool:
    return MISREAD.search(text) is not None
