"""Every message to a site is a request, and one handler per kind decides what to answer.

    query          hello: read a proposal, check it, ask a person if the policy wants one   handle_hello
    query.census   count rows                                                               handle_census
    query.survival compute the sums of a survival study
handle_study
    query.masking  keys, shares and unmasking of a masked round                             handle_masking
    train          train, evaluate or choose layers under an accepted proposal              handle_train
    query.alive    nothing is read or written                                               here

Whatever is refused or fails, the server gets the same sentence, and the site's log gets the reason.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TypedDict

import huggingface_hub.constants
from flwr.app import Context, Error, Message, MessageType

from fedfrozen_app import client_app
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import ErrorCode
from fedfrozen_app.core.formatting import quoted
from fedfrozen_app.core.logs import about
from fedfrozen_app.core.tracing import is_tracing, round_span
from fedfrozen_app.exchange.census_messages import CENSUS
from fedfrozen_app.exchange.hello_messages import ALIVE, REFUSED, alive_reply
from fedfrozen_app.exchange.masking_messages import MASKING
from fedfrozen_app.exchange.messages import Reply, ticket_of, train_reply
from fedfrozen_app.exchange.proposal import RUN_ID
from fedfrozen_app.exchange.study_messages import STUDY
from fedfrozen_app.sites.handle_census import census_answer, handle_census
from fedfrozen_app.sites.handle_hello import handle_hello, hello_answer
from fedfrozen_app.sites.handle_masking import handle_masking
from fedfrozen_app.sites.handle_study import handle_study
from fedfrozen_app.sites.handle_train import handle_train
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.refusals import LimitReached, RequestRefused
from fedfrozen_app.sites.site_state import Incoming, SiteState

log = logging.getLogger(__name__)
HANDLERS = {
    MessageType.QUERY: handle_hello,
    CENSUS: handle_census,
    STUDY: handle_study,
    MessageType.TRAIN: handle_train,
    MASKING: handle_masking,
}


class RequestHandler:
    """Answers the messages of one site."""

    def __init__(self, kit: Kit) -> None:
        self.kit, self.site = kit, SiteState(kit)

    def handle(self, message: Message, context: Context, bundle: str) -> Message:
        """The reply. No exception leaves this method: its text may quote the site's data."""
        with about(site=self.kit.name, **subject_of(message)), self.traced("request", message):
            return self._handle(message, context, bundle)

    def traced(self, name: str, message: Message, began: int | None = None) -> AbstractContextManager[None]:
        """A span of the message's round, where the policy shows what the site does (`monitoring`)."""
        if not is_tracing() or not self._shows_activity():
            return nullcontext()
        about_message = subject_of(message)
        return round_span(name, about_message["run"], about_message["round"], began)

    def _shows_activity(self) -> bool:
        try:
            return Policy.read(self.kit.policy).monitoring == "activity"
        except UserError:  # the request itself will fail with it
            return False

    def _handle(self, message: Message, context: Context, bundle: str) -> Message:
        kind = message.metadata.message_type
        if kind == ALIVE:
            return alive_reply(message)
        details = {"message": kind, "flower_run": context.run_id, "bundle": bundle}
        site = self.site
        try:
            site.budget.check(site.audit)
            policy = Policy.read(self.kit.policy)
            site.check_limit("refusals", policy.refusals_per_day, "refused", "failed", "declined")
            huggingface_hub.constants.HF_HUB_OFFLINE = not policy.downloads
            if kind not in HANDLERS:
                raise RequestRefused(f"it knows no {kind} messages")
            return HANDLERS[kind](site, Incoming(message, context, policy, details))
        except LimitReached as refusal:
            log.warning("Refused: %s.", quoted(str(refusal)))
        except RequestRefused as refusal:
            log.warning("Refused: %s.", quoted(str(refusal)))
            site.note(refusal.event, **details, reason=str(refusal))
        except Exception as error:  # of any kind: its text may hold a path or a value of the site's
            log.exception("A message could not be answered.")
            site.note("failed", **details, error=type(error).__name__)
        return self._refusal(message)

    def _refusal(self, message: Message) -> Message:
        """The same for every reason."""
        kind, site = message.metadata.message_type, self.site
        if kind == MessageType.QUERY:
            return hello_answer(site, message, REFUSED)
        if kind in (CENSUS, STUDY):
            return census_answer(site, message, REFUSED)
        if kind == MessageType.TRAIN:
            reply = Reply("", declined=f"failed: {client_app.FAILED}", anchor=site.audit.head)
            return train_reply(message, reply, local=False)
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, client_app.FAILED), reply_to=message)


class Subject(TypedDict):
    run: str | None
    round: int | None


def subject_of(message: Message) -> Subject:
    """Run and round of a message, for log lines; the run of a hello is known once it is parsed."""
    run, number = ticket_of(message).get("run", ""), message.metadata.group_id
    return {
        "run": run if RUN_ID.fullmatch(run) else None,
        "round": int(number) if number.isdecimal() and len(number) < 10 else None,
    }
