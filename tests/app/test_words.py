"""The core speaks the field's language: identifiers that were renamed do not come back."""

import io
import re
import tokenize
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


def found_in(path: Path) -> list[str]:
    """Old identifiers in code, and old words in comments and strings."""
    allowed = ALLOWED.get(str(path.relative_to(ROOT)), set())
    text, found = path.read_text("utf-8"), []
    words = set(re.findall(r"\w+", text))  # splitting every file into tokens takes seconds
    named = any(word in RENAMED or not PARTS.isdisjoint(word.lower().split("_")) for word in words)
    if not named and not PROSE.search(text):
        return found
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        place = f"{path.relative_to(ROOT)}:{token.start[0]}"
        if token.type == tokenize.NAME:
            parts = {*token.string.lower().split("_")} & PARTS
            names = {token.string, *parts} & RENAMED.keys() - allowed
            found += [f"{place} {token.string}: write {RENAMED[name]}" for name in names]
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            words = {match[0] for match in PROSE.finditer(token.string)}
            found += [f"{place} {word!r} in a comment or a string" for word in words if word not in allowed]
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
