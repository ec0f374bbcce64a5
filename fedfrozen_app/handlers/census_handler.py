"""A client's answer to a census."""

from flwr.app import Context, Message

from fedfrozen_app.census.ask import read_ask
from fedfrozen_app.exchange.census_messages import CensusReply, census_reply, census_text
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.local.worker_for import config_of


def handle_census(message: Message, context: Context) -> Message:
    """Answer for clients without a policy. A site's executor has a policy, and its own handler."""
    from fedfrozen_app.census import record_source
    from fedfrozen_app.census.site import Rules, released_counts

    ask = read_ask(census_text(message))
    node = context.node_config
    if "site" in node:
        config, name = config_of(str(context.run_config["overrides"])), str(node["site"])
        path = None if "data-path" not in node else str(node["data-path"])
        records = record_source.records_of_folder(config.dataset, path)
        rules = Rules(ask.floor, ask.columns)
    else:
        count = int(node["num-partitions"])
        config, clients = record_source.simulated(str(context.run_config["overrides"]), count)
        name = list(clients)[int(node["partition-id"])]
        records, rules = clients[name], Rules(ask.floor, ask.columns, ask.id.encode())
    found = released_counts(ask, records, rules, {}, record_source.tokens_of(config))
    return census_reply(message, CensusReply(name, json=canonical(found)))
