"""A data steward's first hour with the page, timed: read, refuse, approve, look back, revoke, set a limit.

    python -m tests.desk.trial [--keyboard] [--pictures DIR] [--figure docs/figures/desk.png]

Prints the seconds of each step: those of the machine, and those of a person who reads every word that a page
shows for the first time (4 words a second) and types (3 characters a second). `--keyboard` uses no mouse.
`--pictures` keeps each page at two widths, light and dark, `--figure` that of the bad request for the docs.
Exit code 1 when a page has a fault.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfrozen_app.core.formatting import counted
from tests.desk.looks import problems_of
from tests.desk.trial_site import BAD, GOOD, TrialSite, prepare

READS, TYPES = 4.0, 3.0  # words and characters a second
LOOKS = [(width, scheme) for width in (1280, 400) for scheme in ("light", "dark")]
NAME_OF_FOCUS = """(() => { const node = document.activeElement;
  return (node.matches("select") ? "" : node.textContent.trim()) || node.name; })()"""
PATIENCE = 120_000.0  # milliseconds for a page, on a busy machine


@dataclass
class Step:
    name: str
    machine: float = 0.0
    words: int = 0
    typed: int = 0

    @property
    def person(self) -> float:
        return self.words / READS + self.typed / TYPES


@dataclass
class Steward:
    """Reads and presses; nothing else of the page is used than what is shown."""

    page: Any
    keyboard: bool = False
    pictures: Path | None = None
    figure: Path | None = None
    steps: list[Step] = field(default_factory=list)
    decided_after: int = 0  # steps, until both requests are decided
    faults: list[str] = field(default_factory=list)
    closed: bool = False
    _read: set[str] = field(default_factory=set)

    @property
    def decision(self) -> list[Step]:
        """From the start of the command until one request is refused and one approved."""
        return self.steps[1 : self.decided_after]

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        began = time.monotonic()
        self.steps.append(Step(name))
        yield self.steps[-1]
        self.steps[-1].machine = time.monotonic() - began

    def press(self, word: str) -> None:
        """A link or button that says this; the last of them, if there are several."""
        if self.keyboard:
            self.focus(word)
            with self.page.expect_navigation():
                self.page.keyboard.press("Enter")
        else:
            link, button = (self.page.get_by_role(kind, name=word, exact=True) for kind in ("link", "button"))
            link.or_(button).last.click()
        self.page.wait_for_load_state()

    def focus(self, word: str) -> None:
        """With the tabulator alone, by what the control says."""
        for _ in range(100):
            self.page.keyboard.press("Tab")
            if self.page.evaluate(NAME_OF_FOCUS) == word:
                return
        raise AssertionError(f"{word} cannot be reached with the keyboard")

    def write(self, name: str, text: str) -> None:
        self.steps[-1].typed += len(text)
        if self.keyboard:
            self.focus(name)
            self.page.keyboard.type(text)
        else:
            self.page.locator(f"input[name={name}]").fill(text)

    def choose(self, name: str, value: str) -> None:
        if self.keyboard:
            self.focus(name)
            self.page.keyboard.type(value)
        else:
            self.page.select_option(f"select[name={name}]", value)

    def read(self, *expected: str) -> str:
        """All that is shown; lines that were read before cost nothing."""
        shown = self.page.inner_text("body")
        fresh = [line for line in shown.splitlines() if line.strip() and line not in self._read]
        self._read |= set(fresh)
        self.steps[-1].words += sum(len(line.split()) for line in fresh)
        missing = [part for part in expected if part not in " ".join(shown.split())]
        self.faults += [f"{self.steps[-1].name}: does not say '{part}'" for part in missing]
        return shown

    def note_complaint(self, found: Any) -> None:
        """Of the browser, while the page is open."""
        if not self.closed:
            place = getattr(found, "location", {}).get("url", "")
            self.faults.append(f"the browser complains: {found} {place}".rstrip())

    def check_looks(self, name: str) -> None:
        """At two widths, light and dark: faults that can be computed, and pictures for a person.

        Between steps: it is no part of the steward's time."""
        for width, scheme in LOOKS:
            self.page.set_viewport_size({"width": width, "height": 900})
            self.page.emulate_media(color_scheme=scheme)
            self.faults += [f"{name}, {width} {scheme}: {one}" for one in problems_of(self.page)]
            if self.pictures is not None:
                path = self.pictures / f"{name}-{width}-{scheme}.png"
                self.page.screenshot(path=path, full_page=True)
        if name == "bad" and self.figure is not None:
            self.page.set_viewport_size({"width": 900, "height": 900})
            self.page.emulate_media(color_scheme="light")
            self.page.screenshot(path=self.figure, full_page=True)
        self.page.set_viewport_size({"width": 1280, "height": 900})
        self.page.emulate_media(color_scheme="light")
        self.page.evaluate("document.activeElement.blur()")


def work(steward: Steward, site: TrialSite, address: str) -> None:
    """The steward's hour, in the order of the page for data stewards."""
    page = steward.page
    with steward.step("open the address, read what waits"):
        page.goto(address)
        page.wait_for_selector("h1:has-text('What waits')")
        steward.read("your rules refuse it", "NO privacy noise", "your rules allow it", "epsilon 2")
    steward.check_looks("waiting")
    read_and_refuse(steward)
    read_and_approve(steward)
    steward.decided_after = len(steward.steps)
    with steward.step("the server trains the approved run (no time of the steward's)"):
        site.train("run_id=heart-2", *GOOD, folder="heart-2")
    if site.ask(site.proposal("nightly", *BAD)) != "refused":
        steward.faults.append("a run without noise is not refused")
    look_back(steward)
    revoke_and_limit(steward, site)
    with steward.step("close the page"):
        steward.press("Close this page")
        steward.closed = True
        steward.read("The page is closed.")
    steward.check_looks("closed")


def open_request(steward: Steward, run: str) -> None:
    steward.press("Waiting")
    entry = steward.page.locator("article").filter(has_text=run)
    if steward.keyboard:
        names = steward.page.locator("article h2").all_inner_texts()
        at = next(number for number, name in enumerate(names) if run in name)
        for _ in range(at + 1):
            steward.focus("Read and decide")
        steward.page.keyboard.press("Enter")
    else:
        entry.get_by_role("link").click()
    steward.page.wait_for_selector(f"h1:has-text('{run}')")
    wait_for_count(steward.page)


def wait_for_count(page: Any) -> None:
    deadline = time.monotonic() + PATIENCE / 1000
    while "Being counted" in page.inner_text("main") and time.monotonic() < deadline:
        time.sleep(0.5)
        page.reload()


def read_and_refuse(steward: Steward) -> None:
    with steward.step("read the bad request"):
        open_request(steward, "heart-3")
        steward.read(
            *("Your rules refuse this request.", "What differs from heart-pilot"),
            *("Columns the run reads the column postcode", "postcode (FORBIDDEN by your rules)"),
            'Columns read ["age", "dose", "sex"] ["age", "dose", "postcode", "sex"]',
            *('Privacy noise "dp_sgd" "none"', "NO NOISE", "Passes over the rows, each round 1 2"),
            *("it takes part in private runs only", "96 people, 96 rows", "NOT masked"),
            "Updates of the model, no rows: head",
        )
    steward.check_looks("bad")
    with steward.step("refuse it with a reason"):
        steward.write("reason", "no noise, postcodes, twice the passes")
        steward.press("Refuse")
        steward.page.wait_for_selector("text=Refused by")
        steward.read("no noise, postcodes, twice the passes")
    steward.check_looks("refused")


def read_and_approve(steward: Steward) -> None:
    with steward.step("read the good request"):
        open_request(steward, "heart-2")
        steward.read(
            *("Your rules allow this request.", "What differs from heart-pilot", "120 people, 120 rows"),
            *("Epsilon 2, delta 1e-06 for each patient", "1 spent 2 this request 5 left of 8"),
            *("Updates of the model, no rows: head", "age, dose, sex"),
        )
    steward.check_looks("good")
    with steward.step("approve it"):
        steward.press("Approve")
        steward.page.wait_for_selector("text=Approved by")
        steward.read()
    steward.check_looks("approved")


def look_back(steward: Steward) -> None:
    pages: dict[str, tuple[str, ...]] = {
        "Privacy budget": ("Epsilon 3 of 8 is spent, 5 is left.", "heart-pilot", "heart-2"),
        "Past runs": ("heart-2", "heart-pilot", "training"),
        "Log": ("The chain is whole", "refused", "approved"),
        "Decided": ("heart-3", "heart-2", "heart-pilot", "Refused without asking you", "nightly"),
        "Rules": ("forbidden_columns", "postcode", "privacy_required"),
    }
    for name, expected in pages.items():
        with steward.step(f"look at: {name}"):
            steward.press(name)
            steward.read(*expected)
        steward.check_looks(name.lower().replace(" ", "-"))


def revoke_and_limit(steward: Steward, site: TrialSite) -> None:
    with steward.step("revoke the approval"):
        steward.press("Decided")
        steward.press("Training run heart-2")
        steward.write("reason", "the wrong study")
        steward.press("Revoke")
        steward.page.wait_for_selector("text=the wrong study")
        steward.read("Approve after all")
    if site.ask(site.proposal("heart-2", *GOOD)) != "refused":
        steward.faults.append("a revoked run is still answered")
    with steward.step("set a limit"):
        steward.press("Rules")
        steward.choose("key", "max_epsilon")
        steward.write("value", "4")
        steward.press("Set the limit")
        steward.page.wait_for_load_state()
        steward.read()
    if "max_epsilon: 4" not in site.own.policy.read_text():
        steward.faults.append("the limit was not set")


@contextmanager
def desk_of(site: TrialSite) -> Iterator[tuple[str, float]]:
    """The real command: its address, and the seconds until it was printed."""
    began = time.monotonic()
    words = [sys.executable, "-P", "-m", "fedfrozen_app", "site", "desk", str(site.own.folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(line.strip() for line in process.stdout if "http://" in line), time.monotonic() - began
            process.wait(20)
        finally:
            process.kill()


def trial(
    browser: Any,
    folder: Path,
    *,
    keyboard: bool = False,
    pictures: Path | None = None,
    figure: Path | None = None,
) -> Steward:
    began = time.monotonic()
    site = prepare(folder)
    first = Step("IT: set the site up; the pilot trains", time.monotonic() - began)
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    steward = Steward(context.new_page(), keyboard, pictures, figure, [first])
    steward.page.set_default_timeout(PATIENCE)
    for kind in ("console", "pageerror"):
        steward.page.on(kind, steward.note_complaint)
    with desk_of(site) as (address, seconds):
        steward.steps.append(Step("start `fedfrozen site desk`", seconds))
        work(steward, site, address)
    context.close()
    return steward


def show(steward: Steward) -> None:
    rows = [(one.name, one.machine, one.person, one.words) for one in steward.steps]
    print(f"{'step':<62}{'machine':>9}{'person':>9}{'words':>7}")
    for name, machine, person, words in rows:
        print(f"{name:<62}{machine:>7.1f} s{person:>7.0f} s{words:>7}")
    both = steward.decision
    print(
        f"Both requests are decided after {sum(one.machine + one.person for one in both) / 60:.1f} minutes: "
        f"{sum(one.words for one in both)} words, {sum(one.machine for one in both):.0f} s of the machine."
    )
    total = sum(one.machine + one.person for one in steward.steps[1:]) / 60
    print(f"The steward's time: {total:.1f} minutes, reading every word once.")
    for fault in steward.faults:
        print(f"FAULT  {fault}")
    print(f"{counted(len(steward.faults), 'fault')}.")


def main() -> int:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keyboard", action="store_true")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        kept = {"pictures": options.pictures, "figure": options.figure}
        steward = trial(browser, Path(folder), keyboard=options.keyboard, **kept)
        browser.close()
    show(steward)
    return 1 if steward.faults else 0


if __name__ == "__main__":
    sys.exit(main())
