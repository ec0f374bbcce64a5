"""`fedfrozen site metrics [KIT]` and `fedfrozen server metrics KIT`: numbers for Prometheus, until Ctrl-C."""

import os
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.monitoring.endpoint import HOST, PATH, Source, make_endpoint
from fedfrozen_app.monitoring.server_source import ServerSource
from fedfrozen_app.monitoring.site_source import SiteSource
from fedfrozen_app.sites.kit import Kit


def site_metrics(arguments: list[str]) -> None:
    given = parse("site metrics", arguments)
    source = SiteSource.of(Kit.read(given.kit))
    source.collect()  # report at the start what keeps it from showing anything
    source.parts.start()
    serve(source, given.port, str(given.kit))


def server_metrics(arguments: list[str]) -> None:
    given = parse("server metrics", arguments)
    folder = Path(given.kit).expanduser().resolve()
    if not (folder / "server.yaml").exists():
        raise UserError(f"{folder} is no server's kit (it has no server.yaml): give the folder of one.")
    serve(ServerSource.of(folder), given.port, str(given.kit))


def serve(source: Source, port: int, what: str) -> None:
    os.umask(0o077)
    with make_endpoint(source, port) as server:
        print(
            f"The numbers of {what}: http://{HOST}:{server.server_port}{PATH} (Ctrl-C ends it).", flush=True
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("Stopped.")
