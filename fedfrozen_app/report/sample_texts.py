"""What a language model wrote, as a section of the report: from samples.json."""

import json
from pathlib import Path
from typing import Any

from fedfrozen_app.report.html import box, pairs

FILE = "samples.json"
LINES = {"prompt": "prompt", "answer": "the data's answer", "before": "before training", "after": "after"}


def read_samples(run: Path) -> list[dict[str, Any]]:
    """Empty where the model writes none, or where somebody has changed the file."""
    try:
        found = json.loads((run / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) and all(isinstance(one, dict) for one in found) else []


def samples_section(found: list[dict[str, Any]]) -> str:
    """Escaped: what a model writes may look like anything."""
    if not found:
        return ""
    boxes = [
        box(pairs([(title, str(one[key])) for key, title in LINES.items() if key in one])) for one in found
    ]
    note = "The likeliest token at each place, after prompts of the first test rows."
    return f'<h2>Text</h2>{"".join(boxes)}<p class="note">{note}</p>'
