"""Clients' uploads, kept for audits in `uploads/ROUND/`.

base.safetensors     the model that the clients were sent
CLIENT.safetensors   the model after this client's training
digests.json         which clients are here, and the digests of the files
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.files.disk import replace_file, replace_tensors
from fedfrozen_app.files.seal import reason, sealed, unsealed

if TYPE_CHECKING:  # torch takes seconds to import, and listing runs does not need it
    from torch import Tensor

BASE, INDEX = "base.safetensors", "digests.json"


def write_upload(
    folder: Path, client: str, base: "Mapping[str, Tensor]", sent: "Mapping[str, Tensor]"
) -> None:
    """Write into the folder of a round, which may have other clients' uploads."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_tensors(base, folder / BASE)
    replace_tensors(sent, folder / f"{client}.safetensors")
    files = sorted(folder.glob("*.safetensors"))
    replace_file(
        folder / INDEX, sealed({"clients": [path.stem for path in files if path.name != BASE]}, *files)
    )


def read_upload(folder: Path, client: str) -> "tuple[dict[str, Tensor], dict[str, Tensor]] | None":
    """The round's model and this client's; None if the client's was not kept. Raises `UserError`."""
    from safetensors.torch import load_file

    path = folder / f"{client}.safetensors"
    try:
        if client not in kept_clients(folder) and not path.exists():
            return None
        return load_file(folder / BASE), load_file(path)
    except (SafetensorError, *DAMAGED) as error:
        raise UserError(
            f"{folder} is damaged ({reason(error)}): remove it, and the audit leaves that round out."
        ) from error


def kept_clients(folder: Path) -> list[str]:
    """The clients of a round, all files checked; none in a folder of an older version. Raises `DAMAGED`."""
    return list(unsealed(folder / INDEX)["clients"]) if (folder / INDEX).exists() else []
