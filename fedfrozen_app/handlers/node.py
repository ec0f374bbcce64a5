"""The client's name and paths, from its Flower context."""

from pathlib import Path

from flwr.app import Context

from fedfrozen_app.core.flower_internals import get_flwr_home


def client_name(context: Context) -> str:
    node = context.node_config
    return str(node["site"] if "site" in node else node["partition-id"])


def in_process(context: Context) -> bool:
    """Whether the server shares this process, so that arrays need not be serialized."""
    return bool(context.node_config.get("in-process", False))


def privacy_folder(context: Context) -> Path:
    """Where this client keeps its privacy record."""
    node = context.node_config
    if "site" in node:
        return Path(str(node.get("privacy-dir") or get_flwr_home() / "fedfrozen" / "privacy"))
    named = str(context.run_config.get("output-dir", ""))
    return (Path(named) if named else get_flwr_home() / "fedfrozen" / f"run-{context.run_id}") / "privacy"
