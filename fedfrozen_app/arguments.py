"""The words after a verb, read by argparse: what it cannot read is one sentence, and not its usage."""

import argparse
from typing import NoReturn

from fedfrozen_app.errors import UserError


class Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}: see {self.prog} --help.")
