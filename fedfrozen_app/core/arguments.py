"""Arguments after a verb, read by argparse. A mistake gives one sentence instead of the usage text."""

import argparse
from typing import NoReturn

from fedfrozen_app.core.errors import UserError


class Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}: see {self.prog} --help.")
