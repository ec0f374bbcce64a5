"""The one error that people see as a sentence instead of a traceback."""


class UserError(Exception):
    """Something the person at the keyboard can mend: one sentence, what is wrong and what to change."""
