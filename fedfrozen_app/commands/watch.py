"""`fedfrozen report` writes the page of a run or sweep; `fedfrozen watch` serves it while it grows.

The server listens on this machine only, and answers only requests with that host name: requests of a foreign
page through the user's browser (DNS rebinding) are refused.
"""

import hashlib
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.files.folders import run_folders
from fedfrozen_app.files.kinds import RUN, kind_of
from fedfrozen_app.report.compare.compare_page import linked
from fedfrozen_app.report.html import render_page, save
from fedfrozen_app.report.run_page import run_page, write_report
from fedfrozen_app.report.site_states import version_of
from fedfrozen_app.sweep.sweep_page import sweep_page

HOST = "127.0.0.1"
WATCHED_FILES = ("metrics.jsonl", "summary.json", "status.json")


def report(arguments: list[str]) -> None:
    """`fedfrozen report DIR`: report.html of a run, comparison.html of a sweep, finished or not."""
    folder = _existing(parse("report", arguments).folder)
    if kind_of(folder) == RUN:
        path = write_report(folder)
    elif run_folders([folder]):
        path = folder / "comparison.html"
        save(sweep_page(folder, link=linked(folder)), path)
    else:
        raise UserError(f"{folder} holds no run: give the folder of a run, or of a sweep.")
    print(path)


def watch(arguments: list[str]) -> None:
    """`fedfrozen watch DIR [--port N]`: the live page of a run or a sweep, until Ctrl-C."""
    given = parse("watch", arguments)
    with make_server(_existing(given.folder), given.port) as server:
        address = f"http://{HOST}:{server.server_port}/"
        print(f"Watching {given.folder} at {address} (Ctrl-C ends it).", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("Stopped watching.")


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    live_pages = LivePages(folder)

    class Handler(_Handler):
        pages = live_pages

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"Port {port} cannot be used ({error}): add --port 0 for any that is free."
        ) from error


@dataclass
class LivePages:
    """The pages of a folder, rebuilt only when its files have changed."""

    folder: Path
    _made: dict[str, tuple[str, str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def page(self, path: str, after: str) -> str | None:
        """The page at a path; None if it is not newer than `after`. `KeyError` for unknown paths."""
        runs = {quote(_name(run, self.folder)): run for run in run_folders([self.folder])}
        if path == "/":
            version = _version(list(runs.values()))
            make = self._front
        else:
            run = runs[quote(unquote(path.removeprefix("/run/")))]
            version = _version([run])

            def make(version: str) -> str:
                return run_page(run, version=version)

        if version == after:
            return None
        with self._lock:  # two open windows must not build a page twice
            if self._made.get(path, ("", ""))[0] != version:
                self._made[path] = (version, make(version))
            return self._made[path][1]

    def _front(self, version: str) -> str:
        if kind_of(self.folder) == RUN:
            return run_page(self.folder, version=version)
        if not run_folders([self.folder]):
            return render_page("waiting.html", "Waiting", version=version)
        return sweep_page(self.folder, link=self._link, version=version)

    def _link(self, run: Path) -> str | None:
        return f"/run/{quote(_name(run, self.folder))}" if (run / "metrics.jsonl").is_file() else None


class _Handler(BaseHTTPRequestHandler):
    pages: LivePages

    def do_GET(self) -> None:
        try:
            asked, host = urlsplit(self.path), urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:  # a bracket that is not closed
            return self._answer(HTTPStatus.BAD_REQUEST, "The address cannot be read.")
        after = parse_qs(asked.query).get("after", [""])[0]
        if host not in (HOST, "localhost"):
            return self._answer(HTTPStatus.FORBIDDEN, f"Ask for http://{HOST} by that name.")
        try:
            html = self.pages.page(asked.path, after)
        except KeyError:
            return self._answer(HTTPStatus.NOT_FOUND, "There is no such run here.")
        except (UserError, OSError) as error:  # such as a file that is just being replaced
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        if html is None:
            return self._answer(HTTPStatus.NO_CONTENT, "")
        return self._answer(HTTPStatus.OK, html, "text/html")

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        content = text.encode("utf-8", errors="backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a line per request would flood the terminal."""


def _existing(word: str) -> Path:
    folder = Path(word).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"There is no run folder {word}: give the folder of a run, or of a sweep.")
    return folder


def _name(run: Path, folder: Path) -> str:
    return run.relative_to(folder.resolve()).as_posix()


def _version(runs: list[Path]) -> str:
    """A version that changes whenever one of the files does."""
    stamps = []
    for run in runs:
        stamps.append(version_of(run))
        for path in (run / name for name in WATCHED_FILES):
            if path.is_file():
                state = path.stat()
                stamps.append(f"{path} {state.st_mtime_ns} {state.st_size}")
    return hashlib.sha256("\n".join(stamps).encode()).hexdigest()[:16]
