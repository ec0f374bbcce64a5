"""The errors that people see as a sentence instead of a traceback."""


class UserError(Exception):
    """An error that the user can fix: one sentence with the problem and what to change."""


class RunFailed(RuntimeError):
    """The command was valid, but the run did not complete: exit code 1."""


# What reading a damaged file can raise, in addition to a library's own errors.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
