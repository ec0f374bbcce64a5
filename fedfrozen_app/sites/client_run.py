"""Runs the client's own code at a site, and pauses it until its private steps are charged."""

from dataclasses import replace
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.messages import Reply, arrays_of
from fedfrozen_app.handlers import train_handler
from fedfrozen_app.local.client_coroutine import ClientCoroutine, Payment
from fedfrozen_app.sites.check_train import CheckedRequest
from fedfrozen_app.sites.refusals import RequestDeclined, RequestRefused
from fedfrozen_app.sites.site_state import Incoming, SiteState


class ClientRun:
    """One request in progress. The client's state is read from the site's disk, from the files of its
    proposal: Flower's context outlives the request and may hold the state of another."""

    def __init__(self, site: SiteState, incoming: Incoming, checked: CheckedRequest) -> None:
        self.context, self.checked = incoming.context, checked
        request, state = checked.request, RecordDict()
        feedback = request.coder is not None and request.coder.error_feedback
        has_state = request.plan.private or request.method.client_state or feedback
        if has_state and (kept := checked.store.private_for(checked.proposal, request.round)) is not None:
            state["private"] = to_record(kept, local=False)
        if checked.price is not None:  # the budget knows the rounds even if the run's own record is lost
            answered = site.budget.rounds(checked.proposal.run.id)
            unsent = request.round not in answered
            state["privacy"] = ConfigRecord({"rounds": len(answered), "unsent": unsent})
        self.context.state = state
        self.reply = train_handler.not_possible(self.context, checked.worker, request)
        # The size of the cohort decides, before the first step, whether the noise fits.
        arrays, cohort = arrays_of(incoming.message), train_handler.cohort_of(checked.session, request)
        self._coroutine: ClientCoroutine[Reply] = train_handler.serve(
            self.context, checked.worker, request, arrays, None, cohort
        )
        self.payment: Payment | None = None  # due, not yet made

    def until_payment(self) -> None:
        """Run up to the first private step. A client without privacy has none, and does not start yet."""
        if self.checked.price is not None and self.reply is None:
            try:
                due = next(self._coroutine)
            except StopIteration as over:  # something is missing, it declines, or it has the reply already
                self.reply = cast(Reply, over.value)
            else:
                if not isinstance(due, Payment):
                    raise RequestRefused("its private steps were about to begin before they were paid for")
                self.payment = due
        self._check_declined()

    def pay(self) -> None:
        """Write the payment into the client's own record."""
        if self.payment is not None:
            self.payment.run_alone()

    def finish(self) -> tuple[Reply, dict[str, Tensor]]:
        """Run to the end. Returns the client's reply and the arrays that stay here."""
        if self.reply is None:
            try:
                due = next(self._coroutine) if self.payment is None else self._coroutine.send(None)
                while True:
                    due = self._coroutine.send(due.run_alone())
            except StopIteration as over:
                self.reply = cast(Reply, over.value)
        self._check_declined()
        private = self.context.state.pop("private", None)
        reply = replace(
            self.reply,
            arrays={name: tensor.detach().cpu().contiguous() for name, tensor in self.reply.arrays.items()},
            metrics={key: float(value) for key, value in self.reply.metrics.items()},
        )
        return reply, to_tensors(cast(ArrayRecord, private)) if private else {}

    def _check_declined(self) -> None:
        if self.reply is not None and self.reply.declined:
            raise RequestDeclined(self.reply.declined)

    def close(self) -> None:
        """Stop the client, which may hold a lock on its record."""
        self._coroutine.close()
