"""Reduces a client's reply to what may leave the site."""

from dataclasses import replace

from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import parameter_of
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.privacy.steps import COUNT_NOISE, NOISE, SENSITIVITY
from fedfrozen_app.secure.work import PUBLIC, noised
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.refusals import RequestRefused
from fedfrozen_app.sites.views import View, rounded

# Metrics that come from the site's settings and not from its rows. With noise in the sum, the last give
# the amount of noise: `noised_reply` uses them, and no reply that is stored or sent holds them.
ACCOUNT = (*PUBLIC, NOISE, SENSITIVITY, COUNT_NOISE)


def filtered(reply: Reply, request: TrainRequest, policy: Policy, view: View) -> Reply:
    """The reply without the metrics that the policy withholds, and with rounded or declared numbers of
    rows."""
    if request.choosing:
        return Reply(reply.request, chosen=reply.chosen)
    known = {*request.plan.shared, *(request.coder.extra_names if request.coder else ())}
    if strange := sorted(name for name in reply.arrays if parameter_of(name) not in known):
        raise RequestRefused(f"{strange[0]} was about to leave, which the request does not share")
    account = ACCOUNT if noised(request) else PUBLIC
    if policy.sends_metrics:
        left_out = set(ACCOUNT) - set(account)
        metrics = {key: value for key, value in reply.metrics.items() if key not in left_out}
        if request.evaluate:
            metrics["train_rows"] = view.public_count(int(metrics["train_rows"]))
            metrics["test_rows"] = rounded(int(metrics["test_rows"])) if metrics["test_rows"] else 0
            for key in [key for key in metrics if key.endswith(("/rows", "/people"))]:
                metrics[key] = rounded(int(metrics[key]))
    else:
        metrics = {key: value for key, value in reply.metrics.items() if key in account}
    return replace(reply, metrics=metrics, examples=view.public_count(reply.examples))
