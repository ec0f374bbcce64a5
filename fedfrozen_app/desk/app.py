"""The pages and forms of `fedfrozen site desk`. Each form calls the function that the command line calls."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.desk.budget_chart import budget_chart
from fedfrozen_app.desk.catalogue import Texts
from fedfrozen_app.desk.counting import Counts
from fedfrozen_app.desk.foreign_words import grouped, number, outside, short
from fedfrozen_app.desk.gate import Gate, field_of
from fedfrozen_app.desk.proposal_page import Site, summary, values_of, with_verdict
from fedfrozen_app.desk.session import Session
from fedfrozen_app.desk.site_records import Records
from fedfrozen_app.exchange.proposal import HASH
from fedfrozen_app.report.console import human_bytes
from fedfrozen_app.sites import decide
from fedfrozen_app.sites.approval import Approvals, Asked
from fedfrozen_app.sites.history import past_runs, rule_refusals, spending
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.limits import LIMITS, set_limit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.site_budget import SiteBudget

log = logging.getLogger(__name__)
HERE = Path(__file__).parent
STYLE = HERE / "templates" / "desk.css"
A_PAGE = 100  # entries of the log
HIDDEN_FIELDS = ("time", "event", "salt", "previous", "digest")
DECISIONS: dict[str, Callable[[Kit, Asked, str], object]] = {
    "approve": lambda kit, asked, reason: decide.approve(kit, asked),
    "refuse": decide.refuse,
    "revoke": decide.revoke,
}


def templates(texts: Texts, base: str) -> Environment:
    found = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "outside": outside,
        "grouped": grouped,
        "number": number,
        "short": short,
        "bytes": human_bytes,
        "time": clock,
    }
    found.globals |= {"t": texts, "base": base}
    return found


def clock(time: str) -> str:
    """Format a time of the log for people."""
    return f"{time[:10]} {time[11:16]} UTC" if len(time) > 16 else time


class NothingHere(Exception):
    """The page does not exist."""


@dataclass
class Desk:
    """The pages of one site, for one session."""

    folder: Path
    texts: Texts
    session: Session
    counts: Counts
    close: Callable[[], None]
    records: Records = field(default_factory=Records)

    def __post_init__(self) -> None:
        self.pages = templates(self.texts, self.session.base)

    def site(self) -> Site:
        """Read kit and policy from the disk, as they are now."""
        kit = Kit.read(self.folder)
        entries = self.records.of(kit.audit).entries
        return Site(kit, Policy.read(kit.policy), Approvals(kit.approvals), entries)

    def render(self, template: str, **values: Any) -> str:
        frame = {"site": "", "here": template.removesuffix(".html"), "csrf": self.session.csrf}
        return self.pages.get_template(template).render(**frame | values)

    # Pages -------------------------------------------------------------------------------------------

    def waiting(self, request: Request) -> str:
        site = self.site()
        found = [with_verdict(site, one) for one in site.approvals.waiting()]
        return self.render("waiting.html", site=site.kit.name, found=found)

    def decided(self, request: Request) -> str:
        site = self.site()
        found = [one for one in (summary(site, asked) for asked in site.approvals.asked()) if one["decision"]]
        found.sort(key=lambda one: one["decision"].time, reverse=True)
        by_rules = rule_refusals(site.entries)[:A_PAGE]
        return self.render("decided.html", site=site.kit.name, found=found, by_rules=by_rules)

    def proposal(self, request: Request) -> str:
        site = self.site()
        asked = self.asked(site, request)
        values = values_of(site, asked, self.counts)
        shown = {"site": site.kit.name, "policy": site.policy, "kit": site.kit, "this": values}
        return self.render("proposal.html", **values | shown)

    def budget(self, request: Request) -> str:
        site = self.site()
        budget, policy = SiteBudget(site.kit.var / "state" / "budget.json"), site.policy
        spent = budget.spent()
        return self.render(
            "budget.html",
            site=site.kit.name,
            policy=policy,
            spent=spent,
            left=policy.max_epsilon - spent[0],
            charged=budget.charged(),
            chart=budget_chart(spending(site.entries), policy.max_epsilon),
        )

    def runs(self, request: Request) -> str:
        site = self.site()
        return self.render("runs.html", site=site.kit.name, found=past_runs(site.entries))

    def log(self, request: Request) -> str:
        kit = Kit.read(self.folder)
        record, decisions = self.records.of(kit.audit), self.records.of(kit.approvals / decide.LOG)
        end = len(record.entries)
        if (before := request.query_params.get("before", "")).isdecimal() and len(before) < 10:
            end = min(end, int(before))
        begin = max(0, end - A_PAGE)
        return self.render(
            "log.html",
            site=kit.name,
            record=record,
            decisions=decisions,
            shown=list(reversed(record.entries[begin:end])),
            begin=begin,
            is_newest=end == len(record.entries),
            hidden=HIDDEN_FIELDS,
        )

    def rules(self, request: Request) -> str:
        site = self.site()
        values = [(one.name, getattr(site.policy, one.name)) for one in fields(Policy)]
        return self.render(
            "rules.html", site=site.kit.name, path=site.kit.policy, values=values, limits=LIMITS
        )

    # Forms -------------------------------------------------------------------------------------------

    def asked(self, site: Site, request: Request) -> Asked:
        """The proposal of this address; only a full hash identifies one."""
        wanted = request.path_params["hash"]
        if not HASH.fullmatch(wanted) or not site.approvals.has(wanted):
            raise NothingHere
        return site.approvals.find(wanted)

    def decide(self, request: Request, body: bytes) -> Response:
        site = self.site()
        asked = self.asked(site, request)
        if (decision := DECISIONS.get(request.path_params["decision"])) is None:
            raise NothingHere
        decision(site.kit, asked, field_of(body, "reason"))
        log.info("%s: %s (%s).", request.path_params["decision"], asked.title, asked.hash[:12])
        return RedirectResponse(f"{self.session.base}/proposal/{asked.hash}", 303)

    def limit(self, request: Request, body: bytes) -> Response:
        key, value = field_of(body, "key"), field_of(body, "value").strip()
        before, after = set_limit(Kit.read(self.folder), key, value)
        log.info("limit %s: %s, was %s.", key, after, before)
        return RedirectResponse(f"{self.session.base}/rules", 303)

    def leave(self, request: Request, body: bytes) -> Response:
        self.close()
        # Without a style sheet: by the time the browser requests it, the server has ended.
        return HTMLResponse(self.render("message.html", heading="close", text="closed", plain=True))

    # Answers -----------------------------------------------------------------------------------------

    async def page(self, make: Callable[[Request], str], request: Request) -> Response:
        return await self.answer(partial(_html, make, request))

    async def form(self, act: Callable[[Request, bytes], Response], request: Request) -> Response:
        return await self.answer(partial(act, request, await request.body()))

    async def answer(self, make: Callable[[], Response]) -> Response:
        """Known errors become a sentence on a page; unexpected ones are logged to the terminal only."""
        try:
            return await anyio.to_thread.run_sync(make)
        except NothingHere:
            return HTMLResponse(self.render("message.html", heading="problem_title", text="missing"), 404)
        except UserError as error:
            text = str(error)
            return HTMLResponse(self.render("message.html", heading="problem_title", problem=text), 409)


def _html(make: Callable[[Request], str], request: Request) -> Response:
    return HTMLResponse(make(request))


def make_app(desk: Desk, host: str) -> Starlette:
    base, session = desk.session.base, desk.session
    style = STYLE.read_text("utf-8")

    async def css(request: Request) -> Response:
        return Response(style, media_type="text/css")

    def page(path: str, make: Callable[[Request], str]) -> Route:
        return Route(base + path, partial(desk.page, make), methods=["GET"])

    def form(path: str, act: Callable[[Request, bytes], Response]) -> Route:
        return Route(base + path, partial(desk.form, act), methods=["POST"])

    routes = [
        page("/", desk.waiting),
        page("/decided", desk.decided),
        page("/budget", desk.budget),
        page("/runs", desk.runs),
        page("/log", desk.log),
        page("/rules", desk.rules),
        page("/proposal/{hash}", desk.proposal),
        form("/proposal/{hash}/{decision}", desk.decide),
        form("/limit", desk.limit),
        form("/close", desk.leave),
        Route(f"{base}/desk.css", css, methods=["GET"]),
    ]
    entered = desk.render("message.html", heading="title", text="entered", onward=True)
    shut = desk.render("message.html", heading="shut_title", text="shut", plain=True)
    gate = Middleware(Gate, session=session, host=host, entered=entered, shut=shut)
    return Starlette(routes=routes, middleware=[gate])
