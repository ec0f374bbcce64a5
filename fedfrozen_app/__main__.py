"""The command `fedfrozen`: a verb with its arguments, or Hydra overrides to train."""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

from fedfrozen_app.errors import UserError

INTERRUPTED = 130
BAD_INPUT = 2


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command line; the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach us: Hydra would print several lines and exit 1
    prepare_logging()
    signal.signal(signal.SIGTERM, _interrupt)  # a scheduler's kill keeps the work as Ctrl-C does
    from fedfrozen_app import commands

    verbs: dict[str, Callable[[list[str]], Any]] = {
        "resume": commands.resume,
        "evaluate": commands.evaluate,
        "export": commands.export,
    }
    try:
        if arguments and arguments[0] in verbs:
            verbs[arguments[0]](arguments[1:])
        else:
            commands.train(arguments)
    except UserError as error:
        print(f"fedfrozen: {error}", file=sys.stderr)
        return BAD_INPUT
    except commands.FAILURES as error:
        print(f"fedfrozen: the run failed. {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def prepare_logging() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for name in ("fedfrozen_app", "strategies", "clients"):
        logging.getLogger(name).setLevel(logging.INFO)
    # Flower announces a deprecation and every setting: our own lines say what matters here.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
