"""`fedfrozen site audit [KIT]`: the audit log and people's decisions, one line per event."""

import json

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.sites.audit_log import check_anchors, read_audit
from fedfrozen_app.sites.decide import decisions
from fedfrozen_app.sites.kit import Kit

HIDDEN_FIELDS = ("time", "event", "salt", "previous", "digest", "bundle")


def show_audit(arguments: list[str]) -> None:
    """The verb."""
    options = parse("site audit", arguments)
    kit = Kit.read(options.kit)
    for entry in sorted([*read_audit(kit.audit), *decisions(kit)], key=lambda entry: str(entry["time"])):
        head = f"{entry['time'][:19]}  {entry['event']:8}"
        if entry["event"] == "sent":
            epsilon = "" if entry["epsilon"] is None else f", epsilon {entry['epsilon']:g}"
            again = ", again" if entry.get("again") else ""
            print(
                f"{head}run {entry['run']} round {entry['round']}: {counted(len(entry['arrays']), 'array')}, "
                f"{entry['bytes']} bytes from {counted(entry['examples'], 'example')}{epsilon}{again}"
            )
        else:
            rest = {k: v for k, v in entry.items() if k not in HIDDEN_FIELDS}
            print(f"{head}{json.dumps(rest)}")
    if options.anchors is not None:
        count = check_anchors(kit.audit, kit.name, options.anchors)
        print(
            f"The log holds all of the {counted(count, 'anchor')} that {options.anchors} has of {kit.name}."
        )
