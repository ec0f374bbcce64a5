"""A train request on its way through the states of `handle_train`."""

from dataclasses import dataclass, field

from flwr.app import Message
from torch import Tensor

from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.sites.check_train import CheckedRequest
from fedfrozen_app.sites.client_run import ClientRun
from fedfrozen_app.sites.request_states import State
from fedfrozen_app.sites.site_state import Incoming, SiteState
from fedfrozen_app.sites.views import View


@dataclass(frozen=True)
class SiteReply:
    """A reply within the site. It may be sent once it is stored."""

    reply: Reply
    private: dict[str, Tensor] = field(default_factory=dict)  # arrays that stay here
    fresh: bool = True  # trained for this message; otherwise stored by an earlier one
    again: bool = False  # sent before, under the same proposal


@dataclass
class TrainProgress:
    """What is known of the request in its state; a later state has more of it."""

    site: SiteState
    incoming: Incoming
    state: State = State.RECEIVED
    proposal: Proposal | None = None  # from CHECKED on
    view: View | None = None
    checked_request: CheckedRequest | None = None  # from ADMITTED on
    client: ClientRun | None = None  # from PREPARED on
    outcome: SiteReply | None = None  # RECALLED, or from TRAINED on
    base: dict[str, Tensor] = field(default_factory=dict)  # the arrays that a masked update is relative to
    lacks: list[str] = field(default_factory=list)  # arrays that are not here
    reply: Reply | None = None  # what leaves, from MASKED on
    answer: Message | None = None

    @property
    def checked(self) -> CheckedRequest:
        assert self.checked_request is not None
        return self.checked_request

    @property
    def known_outcome(self) -> SiteReply:
        assert self.outcome is not None
        return self.outcome

    @property
    def known_reply(self) -> Reply:
        assert self.reply is not None
        return self.reply

    def close(self) -> None:
        """End the client's work, wherever it stands: it holds a lock on its record."""
        if self.client is not None:
            self.client.close()
