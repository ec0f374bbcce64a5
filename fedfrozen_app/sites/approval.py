"""`approval: ask`: a run waits until a person at the site has approved its hash, and only that hash runs.

    VAR/approvals/HASH.json       what is proposed
    VAR/approvals/HASH.decision   what a person said to it, who, and when

`fedfrozen site pending|show|approve|refuse`. People at the server and at the site compare the hash by another
way than the federation's: the server's log names it too.
"""

import datetime
import json
import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from fedfrozen_app.census.ask import Ask, read_ask
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.proposal import HASH, Proposal, read_proposal
from fedfrozen_app.files.disk import patient, replace_file
from fedfrozen_app.files.seal import DAMAGED
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.store import UPDATES, Budget
from fedfrozen_app.verb_table import parse
from fedfrozen_app.words import counted

SHORTEST = 8  # characters of a hash that tell it apart


@dataclass(frozen=True)
class Decision:
    approved: bool
    by: str
    time: str


@dataclass(frozen=True)
class Approvals:
    folder: Path

    def decision(self, proposal_hash: str) -> Decision | None:
        """What a person has said; a file that cannot be read is no approval."""
        path = self.folder / f"{proposal_hash}.decision"
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text("utf-8"))
            return Decision(found["approved"] is True, str(found["by"]), str(found["time"]))
        except DAMAGED:
            return Decision(False, "nobody: the decision cannot be read", "")

    def has(self, proposal_hash: str) -> bool:
        """Whether it was put before the people of the site."""
        return (self.folder / f"{proposal_hash}.json").exists()

    @patient
    def ask(self, proposal: Proposal | Ask) -> None:
        """Put it before the people of the site."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / f"{proposal.hash}.json", proposal.text)

    def proposals(self) -> list[Proposal | Ask]:
        """All that were ever put before them, oldest first."""
        if not self.folder.is_dir():
            return []
        paths = sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        return [read_any(path.read_text("utf-8")) for path in paths if HASH.fullmatch(path.stem)]

    def decide(self, proposal_hash: str, *, approved: bool) -> None:
        who = pwd.getpwuid(os.getuid()).pw_name
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        text = json.dumps({"approved": approved, "by": who, "time": now})
        replace_file(self.folder / f"{proposal_hash}.decision", text)

    def find(self, word: str) -> Proposal | Ask:
        """By its hash, or enough of its beginning."""
        fits = [one for one in self.proposals() if one.hash.startswith(word)]
        if len(word) < SHORTEST or len(fits) != 1:
            many = "several proposals" if len(fits) > 1 else "no proposal"
            raise UserError(
                f"{word} is the hash of {many}: give at least {SHORTEST} characters; `fedfrozen site "
                "pending` lists what waits."
            )
        return fits[0]


def read_any(text: str) -> Proposal | Ask:
    """A run, or a census."""
    return read_ask(text) if '"kind":"census"' in text else read_proposal(text)


def title(proposal: Proposal | Ask) -> str:
    return f"the census {proposal.id}" if isinstance(proposal, Ask) else f"the run {proposal.run.id}"


def described_census(ask: Ask, kit: Kit, policy: Policy) -> list[str]:
    """A census in plain words."""
    view = kit.view(ask.view)
    where = f"{view.name} ({view.kind})" if view else f"{ask.view}, WHICH THIS SITE DOES NOT HAVE"
    spent = Budget(kit.var / "state" / "budget.json").spent()[0]
    noise = "NONE: counts leave as they are, but for small cells"
    if ask.epsilon is not None:
        left = policy.max_epsilon - spent
        noise = f"noise of epsilon {ask.epsilon:g} for each person; epsilon {left:g} is left, before this"
    return [
        f"hash      {ask.hash}",
        f"census    {ask.id}: nothing is trained",
        f"view      {where}",
        "leaves    how many people and rows there are, by class, by what is missing, by size and length",
        f"          cells of fewer than {policy.census_floor} people are hidden",
        f"columns   {', '.join(ask.columns) or 'none'}",
        f"hashes    {'of every row, under match_key' if ask.matches else 'none'}",
        f"privacy   {noise}",
    ]


def described(proposal: Proposal, kit: Kit, policy: Policy) -> list[str]:
    """A proposal in plain words, and what it would leave of the site's budget."""
    run, privacy, view = proposal.run, proposal.privacy, kit.view(proposal.data.view)
    own = {key: value for key, value in proposal.strategy.items() if key != "name" and value is not None}
    settings = ", ".join(f"{key} {value}" for key, value in own.items())
    where = f"{view.name} ({view.kind})" if view else f"{proposal.data.view}, WHICH THIS SITE DOES NOT HAVE"
    allowed = [role for role in run.roles if role in policy.upload_roles]
    others = [role for role in run.roles if role not in policy.upload_roles]
    figures = policy.metrics and not policy.privacy_required
    lines = [
        f"hash      {proposal.hash}",
        f"run       {run.id}, {counted(run.num_rounds, 'round')}",
        f"strategy  {proposal.strategy['name']}{f' ({settings})' if settings else ''}",
        f"model     {proposal.model.model_type or proposal.model.source}",
        f"view      {where}",
        f"leaves    updates of the parameters: {', '.join(allowed) or 'none'}",
        *([f"          refused by the policy: {', '.join(others)}"] if others else []),
        f"figures   {'losses and accuracies too' if figures else 'none but what privacy costs'}",
    ]
    secure = proposal.secure_aggregation
    if secure.name == "on":
        fewest = max(secure.min_cohort, policy.min_cohort)
        lines.append(f"masked    the server sees sums over at least {fewest} sites, no update of one site")
        if secure.choices == "groups":
            lines.append("          and which layers this site chooses, where the strategy lets it choose")
    else:
        lines.append("masked    NO: the server sees this site's updates")
    spent = Budget(kit.var / "state" / "budget.json").spent()
    left = policy.max_epsilon - spent[0], policy.max_delta - spent[1]
    if proposal.epsilon is None:
        most = counted(UPDATES * run.num_rounds, "update")
        lines.append("privacy   NONE: updates leave as they are, without noise")
        lines.append(f"          at most {most}: one that is resumed may ask for a round twice")
    else:
        unit = view.unit if view else privacy.unit
        cost = f"epsilon {proposal.epsilon:g}, delta {proposal.delta:g}"
        lines.append(f"privacy   {cost} for each {unit}, over the whole run")
    if privacy.audited == kit.name:
        lines.append(f"audit     {privacy.canaries} made-up examples train too: not a model to use")
    lines.append(f"budget    epsilon {left[0]:g} and delta {left[1]:g} are left, before this run")
    return lines


def _read(words: list[str], verb: str) -> tuple[Kit, Approvals, str]:
    options = parse(f"site {verb}", words)
    kit = Kit.read(options.kit)
    return kit, Approvals(kit.approvals), getattr(options, "hash", "")


def pending(words: list[str]) -> None:
    """`fedfrozen site pending [KIT]`."""
    kit, approvals, _ = _read(words, "pending")
    waiting = [one for one in approvals.proposals() if approvals.decision(one.hash) is None]
    for one in waiting:
        if isinstance(one, Ask):
            print(f"{one.hash}  census {one.id}: what data there are; nothing is trained")
            continue
        cost = "no privacy" if one.epsilon is None else f"epsilon {one.epsilon:g}"
        print(f"{one.hash}  run {one.run.id}: {one.strategy['name']}, {one.run.num_rounds} rounds, {cost}")
    if not waiting:
        print(f"Nothing waits for an answer of the site {kit.name}.")


def show(words: list[str]) -> None:
    """`fedfrozen site show HASH [KIT]`."""
    kit, approvals, word = _read(words, "show")
    proposal = approvals.find(word)
    policy = Policy.read(kit.policy)
    if isinstance(proposal, Ask):
        print("\n".join(described_census(proposal, kit, policy)))
    else:
        print("\n".join(described(proposal, kit, policy)))
    if (decision := approvals.decision(proposal.hash)) is not None:
        verb = "approved" if decision.approved else "refused"
        print(f"answer    {verb} by {decision.by}, {decision.time}")


def approve(words: list[str]) -> None:
    """`fedfrozen site approve HASH [KIT]`."""
    _, approvals, word = _read(words, "approve")
    proposal = approvals.find(word)
    approvals.decide(proposal.hash, approved=True)
    print(f"Approved: {title(proposal)}, {proposal.hash}.")


def refuse(words: list[str]) -> None:
    """`fedfrozen site refuse HASH [KIT]`; a run that has begun gets no further answer."""
    _, approvals, word = _read(words, "refuse")
    proposal = approvals.find(word)
    approvals.decide(proposal.hash, approved=False)
    print(f"Refused: {title(proposal)}, {proposal.hash}.")
