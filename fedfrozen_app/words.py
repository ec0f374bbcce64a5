"""Counted nouns, for sentences."""


def counted(number: int, noun: str) -> str:
    """ "1 client", "3 clients"; for nouns that take an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
