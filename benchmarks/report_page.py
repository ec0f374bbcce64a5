"""How large the report of a 100-round, 50-client run is, and how long Chromium takes to open it.

    python benchmarks/report_page.py --rounds 100 --clients 50

The rows are made up, in the form of metrics.jsonl: every client takes part in every round and chooses 8 of 24
layers. Prints JSON.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedfrozen_app.report.run_page import write_report
from fedfrozen_app.report.summary import versions

ROLES = ("embedding", "query", "key", "value", "output", "mlp", "norm", "head")


def make_row(number: int, clients: int, draw: random.Random) -> dict[str, Any]:
    score = 0.9 - 0.8 / (number + 1)
    own = {str(client): min(1.0, max(0.0, draw.gauss(score, 0.05))) for client in range(clients)}
    sent = {role: draw.randrange(10**6) for role in ROLES}
    return {
        "round": number,
        "stage": "warmup" if number <= 20 else "frozen",
        "test_accuracy": score,
        "val_accuracy": score - 0.01,
        "test_loss": 2.3 - 2 * score,
        "train_loss": 2.2 - 2 * score,
        "client_val_before": score - 0.02,
        "client_val_after": score,
        "by_client": {"client_val_before": own, "client_val_after": own},
        "selection": {client: sorted(draw.sample(range(24), 8)) for client in own},
        "bytes_up": sum(sent.values()),
        "bytes_down": sum(sent.values()),
        "bytes_up_by_role": sent,
        "bytes_down_by_role": sent,
        "trained_params": 10**6,
        "clients_ok": clients,
        "clients_failed": 0,
        "seconds": {"train": 1.0, "aggregate": 0.1, "evaluate": 0.2, "total": 1.3},
        "drift": {part: {"rms": draw.random(), "mean_update": draw.random()} for part in ("kernel", "rest")},
        "epsilon_max": number**0.5,
    }


def open_seconds(page: Path, times: int) -> list[float]:
    """From the request until the script has drawn everything, each time in a fresh browser context."""
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        sys.exit("There is no chromium or google-chrome on this machine.")
    found = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for _ in range(times):
            context = browser.new_context()
            tab = context.new_page()
            began = time.perf_counter()
            tab.goto(page.as_uri())
            tab.wait_for_selector("body[data-ready]")
            found.append(time.perf_counter() - began)
            context.close()
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--times", type=int, default=5, help="how often the page is opened")
    given = parser.parse_args()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [make_row(number, given.clients, draw) for number in range(1, given.rounds + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        began = time.perf_counter()
        page = write_report(folder)
        written = time.perf_counter() - began
        opened = open_seconds(page, given.times)
        result = {
            "rounds": given.rounds,
            "clients": given.clients,
            "megabytes": round(page.stat().st_size / 1e6, 3),
            "seconds_to_write": round(written, 3),
            "seconds_to_open": {
                "median": round(statistics.median(opened), 3),
                "worst": round(max(opened), 3),
            },
            "versions": versions(),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
