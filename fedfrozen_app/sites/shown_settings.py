"""What the people of a site read before they approve a run: every value that its hash covers."""

import json
import textwrap

from fedfrozen_app.core.formatting import flatten
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.exchange.strict import Spelled, hash_of

WIDE = 100
MOST_LISTED = 100


def all_values(proposal: Proposal) -> list[str]:
    """Built from what is hashed, so that nothing is left out; as JSON, so that text cannot pass for a
    value."""
    values = [f"{key}={_shown(value)}" for key, value in flatten(proposal.plain).items()]
    lines = textwrap.wrap(", ".join(values), WIDE, break_long_words=False, break_on_hyphens=False)
    return ["hashed    every value that the hash covers:", *(f"          {line}" for line in lines)]


def _shown(value: object) -> str:
    """Show a long list, such as a tokenizer's vocabulary, as its length and digest."""
    if isinstance(value, list) and len(value) > MOST_LISTED:
        return f"({len(value)} values, SHA-256 {hash_of(value)})"
    return json.dumps(value)


def is_noise_in_sum(proposal: Proposal) -> bool:
    secure = proposal.secure_aggregation
    return secure.name == "on" and secure.noise == "sum" and proposal.privacy.name != "none"


def noise_lines(proposal: Proposal | Spelled | None) -> list[str]:
    """What noise in the sum guarantees; empty where each site's own noise is enough."""
    if not isinstance(proposal, Proposal) or not is_noise_in_sum(proposal):
        return []
    return [
        "noise     IN THE SUM ONLY (noise=sum): this site adds a share of the noise, too little by itself.",
        "          Epsilon holds only while few of a round's sites conspire with the server: fewer than a",
        "          third, of three sites none, and fewer still with a low threshold"
        f" (here {proposal.secure_aggregation.threshold:g}: the share of",
        "          sites that must stay to a round's end). policy.yaml: noise_in_sum",
    ]
