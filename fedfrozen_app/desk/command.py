"""`fedfrozen site desk [KIT]`: the data steward's page, on this machine only, until Ctrl-C."""

import asyncio
import os
import pwd
import socket
from pathlib import Path

import uvicorn

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.desk.app import Desk, make_app
from fedfrozen_app.desk.catalogue import ENGLISH, read_texts
from fedfrozen_app.desk.connections import Connection
from fedfrozen_app.desk.counting import Counts
from fedfrozen_app.desk.session import Session
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy

HOST = "127.0.0.1"
LOOK = 1.0  # seconds between two checks whether the session is over


def desk(arguments: list[str]) -> None:
    """The verb."""
    given = parse("site desk", arguments)
    kit = Kit.read(given.kit)
    Policy.read(kit.policy)  # report a bad policy at the start
    check_owner(kit.folder)
    texts = read_texts(ENGLISH if given.texts is None else given.texts)
    os.umask(0o077)  # files that it writes are readable by the site only
    with listening(given.port) as place:
        Server(kit, place, Session(), texts).serve()


class Server:
    """The page's web server, for one session."""

    def __init__(self, kit: Kit, place: socket.socket, session: Session, texts: object) -> None:
        self.place, self.session, self.counts = place, session, Counts(kit.folder)
        self.host = f"{HOST}:{place.getsockname()[1]}"
        page = Desk(kit.folder, texts, session, self.counts, self.close)  # type: ignore[arg-type]
        config = uvicorn.Config(
            make_app(page, self.host),
            http=Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            access_log=False,  # an address holds the token
            log_config=None,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=3,
        )
        self.server = uvicorn.Server(config)

    @property
    def address(self) -> str:
        return f"http://{self.host}{self.session.base}/enter?token={self.session.token}"

    def serve(self) -> None:
        print(f"Open this address in a browser on this machine. It is good once:\n\n  {self.address}\n")
        idle = counted(round(self.session.idle / 60), "minute")
        print(f"Ctrl-C closes the page, and so do {idle} without use.", flush=True)
        try:
            asyncio.run(self._serve())
        except KeyboardInterrupt:
            pass
        finally:
            self.counts.close()
        print("The page is closed.")

    async def _serve(self) -> None:
        watch = asyncio.create_task(self._watch())
        await self.server.serve(sockets=[self.place])
        watch.cancel()

    async def _watch(self) -> None:
        while not self.session.is_over:
            await asyncio.sleep(LOOK)
        self.close()

    def close(self) -> None:
        self.server.should_exit = True


def check_owner(folder: Path) -> None:
    """Check that this account owns the kit: the executor could not read another account's files."""
    owner = folder.stat().st_uid
    if owner == os.geteuid():
        return
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = f"#{owner}"
    raise UserError(
        f"{folder} belongs to the account {name}: start the page as that one (sudo -u {name} fedfrozen site "
        f"desk {folder})."
    )


def listening(port: int) -> socket.socket:
    """A listening socket on loopback; port 0 takes any free port."""
    place = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((HOST, port))
        place.listen()  # an early request waits for the page and is not refused
    except (OSError, OverflowError) as error:
        place.close()
        raise UserError(
            f"Port {port} cannot be used ({error}): leave --port out, and any that is free is taken."
        ) from error
    return place
