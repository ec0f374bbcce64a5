"""The command `fedfrozen`: a verb with its arguments, or Hydra overrides to train."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedfrozen_app.commands.help_page import answer
from fedfrozen_app.errors import UserError
from fedfrozen_app.logs import prepare_logging
from fedfrozen_app.signals import ignore_signals, interrupt_on_signals
from fedfrozen_app.streams import forgive_streams

INTERRUPTED = 130
BAD_INPUT = 2


def main() -> None:
    forgive_streams()
    try:
        code = run(sys.argv[1:])
    finally:
        ignore_signals()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command line; the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    if (text := answer(arguments)) is not None:
        print(text)
        return 0
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach us: Hydra would print several lines and exit 1
    prepare_logging()
    # Flower announces every setting: in our own process our own lines say what matters.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    interrupt_on_signals()
    try:
        plain = [word for word in arguments if word != "--detach"]
        if is_plain_training(plain):
            with nothing_collected():
                prepare_training(plain)
        from fedfrozen_app import commands

        return commands.dispatch(arguments)
    except UserError as error:
        print(f"fedfrozen: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def prepare_training(words: list[str]) -> None:
    """Before the heavy imports and before Hydra writes into the run's folder: a typo should cost neither."""
    from fedfrozen_app.config.keys import check_keys

    check_keys(words)
    from fedfrozen_app.config import compose_config, read, resolved
    from fedfrozen_app.files.folders import check_free

    config = read(resolved(compose_config(words)))
    if config.output_dir is not None:
        check_free(Path(config.output_dir).expanduser().resolve(), overwrite=config.overwrite)
    import fedfrozen_app.launch  # noqa: F401  (the heavy ones)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Imports make half a million objects that stay: to look through them for garbage again and again takes
    a tenth of the start, and once more of every run. In a process that has them nothing is to be gained."""
    if "fedfrozen_app.launch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def is_plain_training(arguments: list[str]) -> bool:
    """Overrides alone: no verb, and none of Hydra's flags."""
    return all("=" in word and not word.startswith("-") for word in arguments)


if __name__ == "__main__":
    main()
