"""The core speaks the field's language: identifiers that were renamed do not come back."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedfrozen_app", "strategies", "clients")
# Old name: the standard word that replaced it.
RENAMED = {
    "comes": "from_server",
    "stays": "client_state",
    "goes": "to_server",
    "slope": "gradient",
    "slopes": "gradients",
    "rows_say": "predict",
    "tells": "metric_names",
    "judge": "evaluate",
    "judged": "evaluated",
    "judging": "evaluation_mode",
    "begun": "started",
    "said": "predictions",
    "tell": "warn, log",
    "quiet": "silence_transformers",
    "whose": "record_source",
    "Resident": "Worker",
    "resident": "worker",
    "Turn": "SlotAssignment",
    "Order": "TrainRequest",
    "card": "data_spec",
    "Told": "AcceptedRun",
    "told": "format_error",
    "heard": "replied",
    "talk": "secagg_messages",
    "Course": "ClientCoroutine",
    "Strand": "ThreadCoroutine",
    "Bench": "WorkerPool",
    "foretell": "prefetch",
    "foretold": "predicted",
    "own_weights": "per_client_kernels",
    "beyond_vmap": "vmap_escape",
    "thin": "factored_gradients",
    "folds": "merged_deltas",
    "meanwhile": "model_modes",
    "usual_norm": "median_norm",
    "carried": "server_state",
    "Conversation": "Membership, Transport, RoundTrip",
}
# As one word of a longer name too: `told_if_full`, `goes_on`.
PARTS = {
    "begun",
    "foretell",
    "foretold",
    "goes",
    "heard",
    "judge",
    "judged",
    "said",
    "slope",
    "slopes",
    "told",
}
PROSE = re.compile(
    r"\b(slopes?|foretells?|foretold|meanwhile|resident|anew|heeds?|by turns|beside one another)\b", re.I
)
# Deprecated aliases for one release, a name in a file format, theory's key in metrics.jsonl, Optuna's `tell`.
ALLOWED = {
    "fedfrozen_app/exchange/train_request.py": {"Order"},
    "fedfrozen_app/local/algorithm.py": {"comes", "stays", "goes", "tells"},
    "fedfrozen_app/models/wrapper.py": {"card"},
    "fedfrozen_app/sweep/search.py": {"tell"},
    "fedfrozen_app/server/seams.py": {"carried", "tells", "judged"},
    "fedfrozen_app/server/state.py": {"carried"},
    "fedfrozen_app/theory/descent.py": {"slope"},
    "fedfrozen_app/theory/figures.py": {"slope"},
}


NAMED = {  # where Python's syntax tree has a name
    ast.Name: ("id",),
    ast.Attribute: ("attr",),
    ast.arg: ("arg",),
    ast.keyword: ("arg",),
    ast.alias: ("name", "asname"),
    ast.FunctionDef: ("name",),
    ast.AsyncFunctionDef: ("name",),
    ast.ClassDef: ("name",),
    ast.ExceptHandler: ("name",),
    ast.MatchAs: ("name",),
}


def identifiers(text: str) -> Iterator[tuple[int, str]]:
    """By line; each once for each place that the syntax tree has."""
    for node in ast.walk(ast.parse(text)):
        for field in NAMED.get(type(node), ()):
            for name in (getattr(node, field) or "").split("."):
                yield getattr(node, "lineno", 0), name


def found_in(path: Path) -> list[str]:
    """Old identifiers in code, and old words in comments and strings."""
    place = str(path.relative_to(ROOT))
    allowed, text, found = ALLOWED.get(place, set()), path.read_text("utf-8"), []
    words = set(re.findall(r"\w+", text))  # a syntax tree of every file takes seconds
    if any(word in RENAMED or not PARTS.isdisjoint(word.lower().split("_")) for word in words):
        for line, name in identifiers(text):
            parts = {*name.lower().split("_")} & PARTS
            names = {name, *parts} & RENAMED.keys() - allowed
            found += [f"{place}:{line} {name}: write {RENAMED[one]}" for one in names]
    if PROSE.search(text):
        for number, line in enumerate(text.splitlines(), 1):
            words = {match[0] for match in PROSE.finditer(line)} - allowed
            found += [f"{place}:{number} {word!r} in a comment or a string" for word in words]
    return found


def test_renamed_words_do_not_come_back():
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 300
    assert [line for path in files for line in found_in(path)] == []


def test_the_check_sees_what_it_looks_for(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / "planted.py"
    path.write_text('slope = 1  # the slope\n"""foretold"""\ntold_if_full = 1\ntold_apart = 2\n')
    assert len(found_in(path)) == 5
