"""The allowed names and numbers of spans."""

SPANS = frozenset(
    {
        *("round", "train", "aggregate", "evaluate"),  # at the server
        *("task", "receive", "request", "send"),  # at a site's executor
        *(
            "checked",
            "approved",
            "admitted",
            "recalled",
            "postponed",
            "prepared",
            "charged",
            "trained",
            "noised",
            "stored",
        ),
        *("masked", "stepped", "logged", "sent", "asked"),  # the states of a train request
    }
)
NUMBERS = frozenset({"round", "clients_ok", "clients_failed", "bytes_up", "bytes_down"})
