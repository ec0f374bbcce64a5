"""Checks every request before a page handles it, and adds security headers to every response.

Pages contain no scripts. A request must name this host and port (against DNS rebinding), the secret path, and
the cookie; a form must come from one of our own pages.
"""

from collections.abc import Sequence
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedfrozen_app.desk.connections import KNOWN
from fedfrozen_app.desk.session import COOKIE, Session

MOST = 16 * 1024  # bytes of a form
FORM = "application/x-www-form-urlencoded"
POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # browsers otherwise omit the page that a form comes from
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}


class Gate:
    """ASGI middleware. `entered` is the page after the token was taken, `shut` the one without a session."""

    def __init__(self, app: ASGIApp, session: Session, host: str, entered: str, shut: str) -> None:
        self.app, self.session, self.host = app, session, host
        self.entered, self.shut = entered, shut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return  # other protocols are not supported

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for key, value in HEADERS.items():
                    headers[key] = value
            await send(message)

        headers, method, path = Headers(scope=scope), scope["method"], scope["path"]
        if (answer := self.problem_of_request(headers, method, path)) is not None:
            return await answer(scope, receive, guarded)
        if path == f"{self.session.base}/enter":
            return await self.enter(scope)(scope, receive, guarded)
        if not self.session.knows(cookie_parser(headers.get("cookie", "")).get(COOKIE)):
            return await HTMLResponse(self.shut, 403)(scope, receive, guarded)
        scope[KNOWN] = True
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return await PlainTextResponse("Another page asked for this.", 403)(scope, receive, guarded)
        if method == "POST":
            body = await read_body(receive)
            if (answer := self.problem_of_form(headers, body)) is not None:
                return await answer(scope, receive, guarded)
            receive = replay(body or b"")
        await self.app(scope, receive, guarded)

    def problem_of_request(self, headers: Headers, method: str, path: str) -> Response | None:
        if headers.getlist("host") != [self.host]:
            return PlainTextResponse("This is not the address of this page.", 421)
        if path == "/favicon.ico":  # which every browser requests
            return Response(status_code=204)
        if not path.startswith(f"{self.session.base}/"):
            return PlainTextResponse("There is nothing here.", 404)
        if method not in ("GET", "POST"):
            return PlainTextResponse("This cannot be done here.", 405)
        return None

    def enter(self, scope: Scope) -> Response:
        """Continue by a page of our own: browsers do not send a strict cookie after a redirect."""
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])
        cookie = self.session.enter(token[0]) if scope["method"] == "GET" and len(token) == 1 else None
        if cookie is None:
            return HTMLResponse(self.shut, 403)
        scope[KNOWN] = True
        answer = HTMLResponse(self.entered)
        answer.set_cookie(COOKIE, cookie, path=f"{self.session.base}/", httponly=True, samesite="strict")
        return answer

    def problem_of_form(self, headers: Headers, body: bytes | None) -> Response | None:
        if body is None:
            return PlainTextResponse("The form is too large.", 413)
        if headers.getlist("origin") != [f"http://{self.host}"]:
            return PlainTextResponse("The form is not of this page.", 403)
        if headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
            return PlainTextResponse("This is no form.", 415)
        if not self.session.is_own_form(field_of(body, "csrf")):
            return PlainTextResponse("The form is not of this page.", 403)
        return None


def field_of(body: bytes, name: str) -> str:
    """One field of a form; empty if it is missing or occurs twice."""
    text = body.decode("utf-8", "replace")
    found: Sequence[str] = parse_qs(text, keep_blank_values=True, max_num_fields=20).get(name, [])
    return found[0] if len(found) == 1 else ""


async def read_body(receive: Receive) -> bytes | None:
    """None if it is too large, or the browser has gone."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > MOST:
            return None
    return body


def replay(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
