"""`approval: ask`: a run waits until a person at the site has approved its hash, and only that hash runs.

    VAR/approvals/HASH.json       what is proposed
    VAR/approvals/HASH.decision   what a person decided, who, when and why
    VAR/approvals/RUN.left        the site has left this run, whatever is proposed for it from now on

`decide` and `approval_verbs` implement the decisions. People at the server and at the site compare the
hash outside the federation, for instance by telephone: the server's log shows it too.
"""

import datetime
import json
import os
import pwd
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fedfrozen_app.census.ask import Ask, read_ask
from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.core.formatting import counted, format_error
from fedfrozen_app.exchange.proposal import HASH, Proposal, read_proposal
from fedfrozen_app.exchange.text_part import TextPart
from fedfrozen_app.files.disk import patient, replace_file
from fedfrozen_app.secure.roster import NEIGHBOURS
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.shown_settings import all_values, noise_lines
from fedfrozen_app.sites.site_budget import SiteBudget
from fedfrozen_app.sites.store import UPDATES
from fedfrozen_app.sites.study_lines import study_line
from fedfrozen_app.study.study_ask import StudyAsk, read_study

SHORTEST = 4  # characters of a hash; more where several proposals begin with the same ones
UNKNOWN = "UNKNOWN: the record of spent epsilon is damaged, and the site answers nothing until it is back"


@dataclass(frozen=True)
class Decision:
    approved: bool
    by: str
    time: str
    reason: str = ""  # of a refusal


@dataclass(frozen=True)
class Asked:
    """A proposal that was shown to the people of the site; `problem`: why it cannot be read."""

    hash: str
    proposal: Proposal | Ask | StudyAsk | None
    problem: str = ""

    @property
    def title(self) -> str:
        if self.proposal is None:
            return "what cannot be read"
        if isinstance(self.proposal, Ask):
            return f"the census {self.proposal.id}"
        if isinstance(self.proposal, StudyAsk):
            return f"the survival study {self.proposal.id}"
        return f"the run {self.proposal.run.id}"

    @property
    def line(self) -> str:
        """For a list of proposals."""
        one = self.proposal
        if one is None:
            return f"{self.hash}  CANNOT BE READ ({self.problem}): it can only be refused"
        if isinstance(one, Ask):
            return f"{self.hash}  census {one.id}: what data there are; nothing is trained"
        if isinstance(one, StudyAsk):
            return study_line(one)
        cost = "no privacy" if one.epsilon is None else f"epsilon {one.epsilon:g}"
        what = f"{one.strategy['name']}, {one.run.num_rounds} rounds, {cost}, {masks_in_short(one)}"
        return f"{self.hash}  run {one.run.id}: {what}"


@dataclass(frozen=True)
class Approvals:
    folder: Path

    def decision(self, proposal_hash: str) -> Decision | None:
        """A person's decision; a file that cannot be read is no approval."""
        path = self.folder / f"{proposal_hash}.decision"
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text("utf-8"))
            reason = str(found.get("reason", ""))  # decisions of earlier versions have none
            return Decision(found["approved"] is True, str(found["by"]), str(found["time"]), reason)
        except DAMAGED:
            return Decision(False, "nobody: the decision cannot be read", "")

    def leave(self, run: str) -> None:
        """Take no further part in this run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / f"{run}.left", "")

    def has_left(self, run: str) -> bool:
        return (self.folder / f"{run}.left").exists()

    def has(self, proposal_hash: str) -> bool:
        """Whether this proposal was shown to the people of the site."""
        return (self.folder / f"{proposal_hash}.json").exists()

    @patient
    def ask(self, proposal: Proposal | Ask | StudyAsk) -> None:
        """Show it to the people of the site, who decide."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / f"{proposal.hash}.json", proposal.text)

    def asked(self) -> list[Asked]:
        """All proposals ever shown to the people of the site, oldest first. One unreadable file does not hide
        the others."""
        found = []
        for path in self.folder.glob("*.json") if self.folder.is_dir() else ():
            if HASH.fullmatch(path.stem):
                found.append((modified(path), read_asked(path)))
        return [one for _, one in sorted(found, key=lambda pair: (pair[0], pair[1].hash))]

    def proposals(self) -> list[Proposal | Ask | StudyAsk]:
        """The proposals that can be read."""
        return [one.proposal for one in self.asked() if one.proposal is not None]

    def waiting(self) -> list[Asked]:
        """The proposals without a decision."""
        return [one for one in self.asked() if self.decision(one.hash) is None]

    def decide(self, proposal_hash: str, *, approved: bool, reason: str = "") -> Decision:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        decision = Decision(approved, account_name(), now, reason)
        self.folder.mkdir(parents=True, exist_ok=True)  # missing if the policy never asks a person
        replace_file(self.folder / f"{proposal_hash}.decision", json.dumps(asdict(decision)))
        return decision

    def find(self, word: str) -> Asked:
        """Find a proposal by its hash or a prefix of it."""
        if len(word) < SHORTEST:
            raise UserError(f"'{word}' is too short for a hash: give {SHORTEST} characters of it or more.")
        fits = [one for one in self.asked() if one.hash.startswith(word)]
        if not fits:
            raise UserError(
                f"No proposal's hash begins with {word}: `fedfrozen site pending` lists what waits."
            )
        if len(fits) > 1:
            raise UserError(f"The hashes of {len(fits)} proposals begin with {word}: give more characters.")
        return fits[0]


def account_name() -> str:
    """The account of the person who decides: its name, or its number in a container without a name for it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"account {os.getuid()}"


def read_asked(path: Path) -> Asked:
    """Read a proposal, or record why it cannot be read: the file may be damaged, or of another version."""
    try:
        found = read_any(path.read_text("utf-8"))
    except DAMAGED as error:
        return Asked(path.stem, None, format_error(error))
    if found.hash != path.stem:
        return Asked(path.stem, None, "the file holds another proposal than its name says")
    return Asked(path.stem, found)


def read_any(text: str) -> Proposal | Ask | StudyAsk:
    """Parse a run, a census or a study, distinguished by the document's own keys: a run may hold any
    words."""
    for read in (read_ask, read_study):
        with suppress(ValueError):
            return read(text)
    return read_proposal(text)


def modified(path: Path) -> float:
    """When the file was written; 0 if unknown."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def described_census(ask: Ask, kit: Kit, policy: Policy) -> list[str]:
    """A census as lines of text for the people of the site."""
    view = kit.view(ask.view)
    where = f"{view.name} ({view.kind})" if view else f"{ask.view}, WHICH THIS SITE DOES NOT HAVE"
    spent = spent_by(kit)
    noise = "NONE: counts leave as they are, but for small cells"
    if ask.epsilon is not None:
        left = UNKNOWN if spent is None else f"epsilon {policy.max_epsilon - spent[0]:g} is left, before this"
        noise = f"noise of epsilon {ask.epsilon:g} for each person; {left}"
    return [
        f"hash      {ask.hash}",
        f"census    {ask.id}: nothing is trained",
        f"view      {where}",
        "leaves    how many people and rows there are, by class, by what is missing, by size and length",
        f"          cells of fewer than {policy.census_floor} people are hidden",
        f"columns   {', '.join(ask.columns) or 'none'}",
        f"hashes    {hashes_line(ask, policy)}",
        f"privacy   {noise}",
    ]


def hashes_line(ask: Ask, policy: Policy) -> str:
    if not ask.matches:
        return "none"
    if not policy.sends_hashes:
        return "asked for, AND THE POLICY REFUSES THEM (census_matches, privacy_required)"
    return "OF EVERY ROW, exact: whoever has match_key can test whether a row is here"


def described(proposal: Proposal, kit: Kit, policy: Policy) -> list[str]:
    """A proposal as lines of text for the people of the site, with the remaining budget."""
    run, privacy, view = proposal.run, proposal.privacy, kit.view(proposal.data.view)
    own = {key: value for key, value in proposal.strategy.items() if key != "name" and value is not None}
    settings = ", ".join(f"{key} {value}" for key, value in own.items())
    where = f"{view.name} ({view.kind})" if view else f"{proposal.data.view}, WHICH THIS SITE DOES NOT HAVE"
    allowed = [role for role in run.roles if role in policy.upload_roles]
    others = [role for role in run.roles if role not in policy.upload_roles]
    lines = [
        f"hash      {proposal.hash}",
        f"run       {run.id}, {counted(run.num_rounds, 'round')}",
        f"strategy  {proposal.strategy['name']}{f' ({settings})' if settings else ''}",
        f"model     {proposal.model.model_type or proposal.model.source}",
        f"view      {where}",
        *text_lines(proposal.texts),
        f"leaves    updates of the parameters: {', '.join(allowed) or 'none'}",
        *([f"          refused by the policy: {', '.join(others)}"] if others else []),
        f"figures   {'losses and accuracies too' if policy.sends_metrics else 'none but what privacy costs'}",
        *masks_lines(proposal, policy),
    ]
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
        lines.append("          its record, in this site's var/, holds what the noise can be worked out from")
    if (spent := spent_by(kit)) is None:
        lines.append(f"budget    {UNKNOWN}")
    else:
        left = policy.max_epsilon - spent[0], policy.max_delta - spent[1]
        lines.append(f"budget    epsilon {left[0]:g} and delta {left[1]:g} are left, before this run")
    return [*lines, *noise_lines(proposal), *all_values(proposal)]


def masks_in_short(proposal: Proposal) -> str:
    secure = proposal.secure_aggregation
    if secure.name != "on":
        return "no masks"
    drawn = NEIGHBOURS if secure.neighbours is None else secure.neighbours
    return f"masks (min_cohort {secure.min_cohort}, threshold {secure.threshold:.2g}, neighbours {drawn})"


def masks_lines(proposal: Proposal, policy: Policy) -> list[str]:
    """What the server sees of updates, and how many drop-outs the masks tolerate."""
    secure = proposal.secure_aggregation
    if secure.name != "on":
        return ["masked    NO: the server sees this site's updates"]
    drawn = NEIGHBOURS if secure.neighbours is None else secure.neighbours
    floors = f"{policy.min_cohort}, {policy.min_threshold:.2g} and {policy.min_neighbours}"
    lines = [
        f"masked    the server sees sums over at least {secure.min_cohort} sites, no update of one site",
        f"          of a round's sites {secure.threshold:.2g} must stay to its end, or there is no sum",
        f"          this site shares masks with all others of a round, or with {drawn} that it draws",
        f"          (the policy asks for at least {floors})",
    ]
    if secure.choices == "groups":
        lines.append("          and which layers this site chooses, where the strategy lets it choose")
    if problem := policy.problem_of_masks(proposal):
        lines.append(f"          THE POLICY REFUSES THEM: {problem}")
    return lines


def text_lines(text: TextPart | None) -> list[str]:
    """How the run tokenizes texts, if the proposal specifies it."""
    if text is None:
        return []
    length = f"{text.max_tokens} tokens of each at most"
    if text.chunks > 1:
        length = f"{text.chunks} chunks of {text.max_tokens} tokens of each at most"
    if (own := text.vocabulary) is None:
        return [f"texts     {length}"]
    pieces = f"{own.size:,} pieces learned from texts of the server's (SHA-256 {own.digest[:12]})"
    return [f"texts     {length}, in {pieces}"]


def spent_by(kit: Kit) -> tuple[float, float] | None:
    """Epsilon and delta of all runs; None if the record is damaged: the site then answers nothing anyway."""
    try:
        return SiteBudget(kit.var / "state" / "budget.json").spent()
    except UserError:
        return None
