"""`python -m fedfrozen_app.report.embed` copies page.js, live.js and page.css into page_files.py.

Flower's bundle carries no .js and no .css, and a run under Flower writes its report from the bundle. So the
pages read the copy; a test fails when it is stale.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = {"SCRIPT": "page.js", "LIVE": "live.js", "CSS": "page.css"}
HEAD = (
    '"""Copies, written by `python -m fedfrozen_app.report.embed`: change page.js, live.js and page.css."""'
)


def page_files() -> str:
    """The text of page_files.py."""
    copies = (
        f'{name} = r"""\n{(FOLDER / file).read_text(encoding="utf-8")}"""' for name, file in SOURCES.items()
    )
    return "\n\n".join([HEAD, *copies]) + "\n"


if __name__ == "__main__":
    (FOLDER / "page_files.py").write_text(page_files(), encoding="utf-8")
