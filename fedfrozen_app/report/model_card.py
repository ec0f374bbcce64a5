"""The README.md of an exported model: what it is, how to load it, how and on what it was trained, and its
limits. All numbers come from the run's own files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.files.folder_manifest import file_digest
from fedfrozen_app.report.calibration import lines_of, read_calibration
from fedfrozen_app.report.data_section import read_data
from fedfrozen_app.report.fairness import read_fairness
from fedfrozen_app.report.loading_example import PIPELINES, Exported, calibrated_example, example
from fedfrozen_app.report.summary import stored_summary

MOST_NAMES = 20  # labels or clients that are listed one by one
TASKS = {
    "image": "One class for each picture",
    "text": "One class for each text",
    "multilabel": "Any number of labels for each text",
    "tokens": "Entities in texts, as a BIO tag for each word",
    "language": "A language model: it continues a text",
}


Section = tuple[str, list[str]]


def model_card(run: Path, exported: Exported) -> str:
    summary, data, fairness = stored_summary(run) or {}, read_data(run), read_fairness(run)
    calibration = read_calibration(run)
    config = summary["config"]
    sections: list[Section] = [
        ("Load it", example(exported)),
        ("What it reads", [exported.reads, *_labels(exported.classes)]),
        ("Results", _results(summary)),
        ("Training data", _data(data, config)),
        ("Training", _training(config, summary)),
        ("Privacy", _privacy(config, summary)),
        ("Fairness", _fairness(fairness)),
        ("Calibration", _calibration(fairness) if calibration is None else _sets(exported, calibration)),
        ("Limits", _limits(exported, config)),
        ("Origin", _origin(run, summary)),
    ]
    strategy, dataset = config["strategy"]["name"], config["dataset"]["name"]
    head = [
        "---",
        f"library_name: {'peft' if exported.adapter else 'transformers'}",
        *([f"pipeline_tag: {PIPELINES[exported.kind]}"] if exported.kind in PIPELINES else []),
        f"tags: [federated-learning, fedfrozen, {strategy}]",
        "---",
        "",
        f"# {exported.model_class}, trained by {strategy} on {dataset}",
        "",
        f"{TASKS.get(exported.kind, exported.kind)}. {exported.parameters:,} parameters.",
    ]
    parts = ["\n".join(head)]
    parts += [f"## {title}\n\n" + "\n".join(lines) for title, lines in sections]
    return "\n\n".join(parts) + "\n"


def _labels(classes: Sequence[str]) -> list[str]:
    if not classes:
        return []
    names = ", ".join(_plain(name) for name in classes[:MOST_NAMES])
    more = f" and {len(classes) - MOST_NAMES} more (`id2label`)" if len(classes) > MOST_NAMES else ""
    return ["", f"{counted(len(classes), 'label')}, in this order: {names}{more}."]


def _results(summary: Mapping[str, Any]) -> list[str]:
    names = {
        "final_test_accuracy": "Accuracy on the test rows",
        "final_test_f1": "F1 on the test rows",
        "final_test_loss": "Loss on the test rows",
        "final_test_perplexity": "Perplexity of the test rows",
        "majority_accuracy": "Accuracy of always naming the most frequent class",
    }
    rows = [(words, f"{summary[key]:.4f}") for key, words in names.items() if _number(summary.get(key))]
    rows += _plain_model(summary.get("baseline"))
    return _table(("metric", "value"), rows) or ["The run recorded no metrics of this model."]


def _plain_model(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The result of a plain model on the same test rows, if the run fitted one."""
    metric = next((name for name in ("accuracy", "f1") if name in (found or {})), None)
    return [(f"For comparison: {found['name']}", f"{found[metric]:.4f}")] if found and metric else []


def _data(data: Mapping[str, Any] | None, config: Mapping[str, Any]) -> list[str]:
    """Row counts. Omits counts of single clients for real sites, or where epsilon does not cover them."""
    name, floor = config["dataset"]["name"], config["dataset"]["subgroup_floor"]
    if data is None:
        return [f"{name}. The run has no record of its rows."]
    rows = data["rows"]
    if config["runtime"]["name"] == "deployed":
        return [
            f"{name}. The sites' rows stayed with them, and their numbers are not in the run. The server had "
            f"{rows['test']['rows']:,} test rows and {rows['server_validation']['rows']:,} for validation."
        ]
    clients, tested = list(data["clients"].values()), f"{rows['test']['rows']:,} test rows"
    bands = data.get("client_bands")  # quantiles in place of very many clients
    count = len(clients) if bands is None else bands["clients"]
    if config["privacy"]["name"] != "none":
        return [
            f"{name}: the rows of {counted(count, 'client')}, and {tested}. How many rows trained is "
            "left out: epsilon does not cover such numbers."
        ]
    dropped = sum(sum(part["dropped"].values()) for part in data["splits"].values())
    lines = [
        f"{name}: {rows['train']['rows']:,} train rows, of which the server kept "
        f"{rows['server_validation']['rows']:,} for validation, and {tested}."
        + (f" {dropped:,} rows of the files were left out." if dropped else "")
    ]
    if bands is not None:
        few, middle, many = (f"{bands['rows'][share]:,.0f}" for share in ("p0", "p50", "p100"))
        return [
            *lines,
            "",
            f"{count:,} clients with {few} to {many} train rows each, {middle} in the middle.",
        ]
    shown = [(_plain(one["name"]), _from(floor, one["rows"])) for one in clients[:MOST_NAMES]]
    if len(clients) > MOST_NAMES:
        shown.append((f"{len(clients) - MOST_NAMES} more", ""))
    return [*lines, "", *_table(("client", "train rows"), shown)]


def _training(config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    name = str(config["strategy"]["name"])
    try:
        says, paper = registry.described("strategies", name)
    except UserError:  # a method of an uninstalled package
        says, paper = "", ""
    client, adapter = config["client"], config["adapter"]
    rows = [
        ("strategy", f"{name}. {says}{f' ({paper})' if paper else ''}"),
        ("rounds", f"{summary['rounds']}, of {config['num_rounds']}"),
        ("clients in a round", f"{config['participation']:.0%}"),
        ("local training", f"{client['local_epochs']} epochs, batches of {client['batch_size']}"),
        ("optimizer", f"{client['optimizer']}, learning rate {client['lr']:g}"),
        ("partition", str(config["partition"]["name"])),
        ("start", _start(config["model"])),
    ]
    if adapter["name"] != "none":
        rows.append(("adapter", f"{adapter['name']}, rank {adapter['rank']}, alpha {adapter['alpha']:g}"))
    return _table(("setting", "value"), rows)


def _start(model: Mapping[str, Any]) -> str:
    if model["source"] == "hub":
        return f"the model {model['path']} of the hub"
    return "random weights" if model["source"] == "config" else "a checkpoint of the person who trained it"


def _privacy(config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    privacy, secure = config["privacy"], config["secure_aggregation"]
    masked = (
        f"Updates were summed under masks, over {secure['min_cohort']} clients or more."
        if secure["name"] == "on"
        else "The server saw each client's update as it was."
    )
    if privacy["name"] == "none":
        return [f"Trained without differential privacy: it may repeat what is in its train rows. {masked}"]
    spent = summary.get("epsilon") or {}
    if not spent or not summary.get("private", False):
        return [f"Not private: the noise of this run came from its seed, which others know. {masked}"]
    lines = [
        f"Differential privacy with epsilon at most {max(spent.values()):.3g} and delta "
        f"{summary['delta']:.2g}, for one {summary['privacy_unit']} of a client. {masked}"
    ]
    if privacy["selection"] == "unaccounted":
        lines.append("Epsilon does not cover which layers the clients chose.")
    if summary.get("audited"):
        lines.append("A client's rows held made-up examples for an audit: do not use this model.")
    return lines


def _fairness(found: Mapping[str, Any] | None) -> list[str]:
    model = (found or {}).get("models", {}).get("global")
    if found is None or not model:
        return ["The run did not evaluate this model by group."]
    body = [
        (
            _plain(column),
            f"{_plain(gap['worst'])} ({gap['worst_accuracy']:.3f})",
            f"{_plain(gap['best'])} ({gap['best_accuracy']:.3f})",
            f"{gap['gap']:.3f} ({gap['low']:.3f} to {gap['high']:.3f})",
        )
        for column, gap in model["gaps"].items()
    ]
    if not body:
        return [f"No two groups of {found['floor']} rows or more could be compared."]
    head = ("group by", "worst (accuracy)", "best (accuracy)", "gap (95 % interval)")
    return [*_table(head, body), "", f"Groups of fewer than {found['floor']} people are not shown."]


def _calibration(found: Mapping[str, Any] | None) -> list[str]:
    error = (found or {}).get("models", {}).get("global", {}).get("all", {}).get("ece")
    if not _number(error):
        return ["Not measured: take a score for an order, not for a probability."]
    return [
        f"Expected calibration error on the test rows: {error:.3f}. Scores are as the model gives them, "
        "without temperature scaling."
    ]


def _sets(exported: Exported, found: Mapping[str, Any]) -> list[str]:
    lines = [f"- {line}" for line in lines_of(found)]
    code = calibrated_example(exported)
    return [*lines, "", *code] if code else lines


def _limits(exported: Exported, config: Mapping[str, Any]) -> list[str]:
    lines = [
        "- Evaluated on the test rows above alone. Other sources, devices or people can give other results.",
        "- Not tested for any clinical, legal or other decision about people.",
    ]
    if exported.kind == "image":
        lines += [
            "- Pictures with transparency: call `convert` as above, because the processor would put them on "
            "white. Pictures are read as they are stored, without their EXIF rotation.",
            '- Where torchvision is installed, pass `backend="pil"` as above: torchvision resizes otherwise.',
        ]
        if config["dataset"]["kind"] in ("dicom", "nifti"):
            lines.append("- DICOM and NIfTI files must first become grey pictures by the same window.")
    if exported.kind == "language":
        lines.append("- It may write what is false, and repeat texts that it was trained on.")
    if config["client"]["precision"] != "float32":
        lines.append(f"- The run evaluated it in {config['client']['precision']}: last digits differ.")
    return lines


def _origin(run: Path, summary: Mapping[str, Any]) -> list[str]:
    versions = summary["versions"]
    rows = [
        ("fedfrozen", f"{versions['fedfrozen']}, commit {summary.get('git_commit') or 'unknown'}"),
        ("torch, transformers", f"{versions['torch']}, {versions['transformers']}"),
        ("seed", str(summary["seed"])),
        ("SHA-256 of the run's model.safetensors", f"`{file_digest(run / 'model.safetensors')}`"),
    ]
    return _table(("", ""), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    body = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *body] if body else []


def _plain(text: str) -> str:
    """Escape a name from the data, which must not be interpreted as Markdown or HTML."""
    return "".join(f"\\{sign}" if sign in r"\`*_{}[]<>#|~" else sign for sign in " ".join(str(text).split()))


def _from(floor: int, count: int) -> str:
    return f"{count:,}" if count >= floor else f"fewer than {floor}"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
