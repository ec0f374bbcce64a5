"""The kind of target of a table, by `dataset.task`."""

from typing import Any

# By dataset.task, if the kind of target has another name.
KINDS = {"classification": "table"}
NOT_TABLES = ("image", "text", "table", "tokens", "language", "survival_discrete", "segmentation")
DISCRETE = "survival_discrete"


def task_of(dataset: Any) -> str:
    """The kind of target, by its name in the registry."""
    asked = dataset.task or "classification"
    if asked == "survival" and dataset.survival_model == "discrete":
        return DISCRETE
    return KINDS.get(asked, asked)


def survival_model(task: str) -> str:
    """The setting that makes this kind of target, where the task is survival."""
    return "discrete" if task == DISCRETE else "cox"
