"""The errors that people see as a sentence instead of a traceback."""


class UserError(Exception):
    """Something the person at the keyboard can mend: one sentence, what is wrong and what to change."""


class RunFailed(RuntimeError):
    """The command was right, and yet a run did not get to a sound end: exit code 1."""


# What reading a damaged file can raise, in addition to a library's own errors.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
