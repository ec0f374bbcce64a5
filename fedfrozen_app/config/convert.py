"""Values that a person wrote, converted by OmegaConf to the types of a dataclass ("1e-3" is a number).

`read_strict` is the counterpart for values that another machine sent: it converts nothing.
"""

import pickle
from copy import deepcopy
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedfrozen_app.config.sentences import sentence
from fedfrozen_app.core.errors import UserError


def convert(kind: type, values: dict[str, Any], within: str = "") -> Any:
    """An instance of the dataclass; a `UserError` names the key that is wrong. `within` precedes its keys."""
    return deepcopy(_converted(kind, pickle.dumps(values), within))


@lru_cache(maxsize=256)  # OmegaConf takes 50 ms for a whole configuration, and runs share most sections
def _converted(kind: type, values: bytes, within: str) -> Any:
    plain = pickle.loads(values)  # noqa: S301 - packed by the caller in this process
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), plain))
    except OmegaConfBaseException as error:
        raise UserError(sentence(error, within)) from error
