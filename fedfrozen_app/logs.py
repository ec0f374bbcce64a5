"""What a person sees of the logs: our own lines, plainly, and the warnings of others."""

import logging
import sys
import warnings


def prepare_logging() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("flwr").propagate = False  # it has a handler of its own: all it says would come twice
    for name in ("fedfrozen_app", "strategies", "clients"):
        logging.getLogger(name).setLevel(logging.INFO)
    warnings.filterwarnings("ignore", category=FutureWarning)
