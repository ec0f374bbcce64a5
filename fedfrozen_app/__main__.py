"""The command `fedfrozen`: a verb with its arguments, or Hydra overrides to train."""

import logging
import os
import signal
import sys

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.errors import UserError
from fedfrozen_app.logs import prepare_logging

INTERRUPTED = 130
BAD_INPUT = 2


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command line; the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach us: Hydra would print several lines and exit 1
    prepare_logging()
    # Flower announces every setting: in our own process our own lines say what matters.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _interrupt)  # a scheduler's kill keeps the work as Ctrl-C does
    try:
        if is_plain_training(arguments):
            # Before the heavy imports and before Hydra makes a run folder: a typo should cost neither.
            read(resolved(compose_config(arguments)))
        from fedfrozen_app import commands

        return commands.dispatch(arguments)
    except UserError as error:
        print(f"fedfrozen: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def is_plain_training(arguments: list[str]) -> bool:
    """Overrides alone: no verb, and none of Hydra's flags."""
    return all("=" in word and not word.startswith("-") for word in arguments)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
