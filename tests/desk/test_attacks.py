"""Attacks on the data steward's page: by a page elsewhere, another account, and the server's own words."""

import asyncio
import os
import socket
import subprocess
import sys
import threading

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.desk import session as sessions
from fedfrozen_app.desk.catalogue import ENGLISH, read_texts
from fedfrozen_app.desk.command import Server, check_owner, listening
from fedfrozen_app.desk.connections import IDLE
from fedfrozen_app.desk.counting import Counts
from fedfrozen_app.desk.foreign_words import number, outside
from fedfrozen_app.desk.session import COOKIE, Session
from fedfrozen_app.exchange.strict import canonical, hash_of
from fedfrozen_app.sites.approval import Approvals
from tests.desk.steward import HOST, open_desk, put_before, words_of, write_pictures
from tests.sites.test_hostile import proposed

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7*7 }}{% raw %}",
    "\x1b[2J\x1b]0;owned\x07",
    "approved\r\nSet-Cookie: a=b",
    "\u202egnihton\u202c",
    "\u200bze\u2060ro",
    "а" + "dmin",  # Cyrillic
    "Z\u0310\u0311\u0312\u0313\u0314" * 20,
    "'; DROP TABLE runs; --",
)


def decided(kit, proposal) -> bool:
    return Approvals(kit.approvals).decision(proposal.hash) is not None


# Words of the server ----------------------------------------------------------------------------------------


def put_classes(kit, *classes: str) -> str:
    """A proposal whose classes are any text; past the strict reader, as a site of another version might."""
    plain = proposed()
    plain["data"]["classes"] = list(classes)
    text, digest = canonical(plain), hash_of(plain)
    kit.approvals.mkdir(parents=True, exist_ok=True)
    (kit.approvals / f"{digest}.json").write_text(text)
    return digest


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_words_are_text(kit, browser, text):
    digest = put_classes(kit, text, "other")
    for path in ("/", f"/proposal/{digest}", "/decided", "/log"):
        page = browser.get(path)
        assert page.status_code == 200
        # Only our own tags: whatever is in the text has lost its brackets and its control characters.
        assert "<script" not in page.text and "<img" not in page.text and "onerror=alert(1)>" not in page.text
        assert all(one.isprintable() or one == "\n" for one in page.text)
    assert browser.decide(digest, "refuse", text).status_code == 303
    for path in (f"/proposal/{digest}", "/decided", "/log"):
        page = browser.get(path).text
        assert "<script" not in page and "<img" not in page
        assert all(one.isprintable() or one == "\n" for one in page)


def test_letters_that_look_like_others_are_named():
    assert "(Cyrillic)" in outside("\u0430dmin") and "(Fullwidth)" in outside("\uff41dmin")
    assert "(Greek, Mathematical)" in outside("\u03bf\U0001d41a")
    assert "(" not in outside("Übergewicht, Größe, naïve, 12") and "(" not in outside("plain")
    assert "\\u202e" in outside("a\u202eb") and "\u0312" not in outside("Z\u0310\u0312")
    assert len(outside("x" * 10_000_000)) < 1000


def test_a_number_is_one_word():
    """No narrow window breaks it at its hyphen. Only short ones: a page must not become wider."""
    assert outside("1e-06") == number(1e-6) == '<bdi class="number">1e-06</bdi>'
    assert 'class="outside"' in outside("1" * 25) and 'class="outside"' in outside("1<b>")


@pytest.mark.parametrize("size", [1_000_000, 10_000_000])
def test_a_proposal_of_any_size_is_a_short_page(kit, browser, size):
    """Above a million characters it is none that the site reads; below, lists are shown by digest."""
    each = [f"class-{number:05d}" for number in range(size // 20)]
    digest = put_classes(kit, *each)
    page = browser.get(f"/proposal/{digest}").text
    assert len(page) < 60_000
    assert ("cannot be read" in page) == (size > 1_000_000)
    assert browser.decide(digest, "refuse").status_code == 303


def test_what_the_policy_s_reasons_quote_is_text(kit, browser):
    plain = proposed()
    plain["strategy"]["name"] = "x" * 60
    digest = hash_of(plain)
    kit.approvals.mkdir(parents=True)
    (kit.approvals / f"{digest}.json").write_text(canonical(plain))
    assert "the strategy xxxx" in browser.get(f"/proposal/{digest}").text


@pytest.mark.parametrize("damage", ["{", "[" * 5000, "\x00\x1b", '{"kind":"census"}'])
def test_what_cannot_be_read_can_be_refused(kit, browser, damage):
    digest = "a" * 64
    kit.approvals.mkdir(parents=True)
    (kit.approvals / f"{digest}.json").write_text(damage)
    assert "cannot be read" in words_of(browser.get(f"/proposal/{digest}").text)
    assert browser.decide(digest, "approve").status_code == 409
    assert browser.decide(digest, "refuse").status_code == 303


def test_a_count_that_fails_or_takes_too_long_is_a_sentence(kit, monkeypatch):
    write_pictures(kit)
    monkeypatch.setattr("fedfrozen_app.desk.counting.PATIENCE", 0.2)
    proposal, counts = put_before(kit), Counts(kit.folder)
    assert counts.of(proposal.hash).done.wait(20)
    assert counts.of(proposal.hash).problem == "it took more than 0 s"
    counts.close()
    other = put_before(kit, run="other")
    assert counts.of(other.hash).done.wait(5) and "closed" in counts.of(other.hash).problem


@pytest.mark.slow
@pytest.mark.parametrize("huge", [False, True])
def test_a_count_is_made_by_a_process_of_its_own(kit, huge):
    """A model of any size that a server proposes takes no memory from the executor."""
    write_pictures(kit, each=12)
    config = {"model__config": proposed()["model"]["config"] | {"num_hidden_layers": 10**7}} if huge else {}
    proposal, counts = put_before(kit, **config), Counts(kit.folder)
    count = counts.of(proposal.hash)
    if huge:
        assert not count.done.wait(5)
        counts.close()
        assert count.done.wait(20) and count.survey is None
        return
    assert count.done.wait(200), count.problem
    assert count.survey is not None and count.survey.rows >= 80 and count.survey.people == count.survey.rows
    assert count.survey.total > count.survey.largest_round > 0


# Other pages, other hosts, other accounts -------------------------------------------------------------------


def test_no_page_holds_a_script_or_a_style_of_its_own(kit, browser):
    proposal = put_before(kit)
    for path in ("/", "/decided", "/budget", "/runs", "/log", "/rules", f"/proposal/{proposal.hash}"):
        answer = browser.get(path)
        assert answer.status_code == 200, path
        assert "<script" not in answer.text and " style=" not in answer.text and "<style" not in answer.text
        assert "javascript:" not in answer.text and " on" not in answer.text.split("<body>")[0]
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "script" not in policy
        for part in ("form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'"):
            assert part in policy
        assert answer.headers["x-frame-options"] == "DENY" and answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers


def test_the_cookie_is_strict_and_bound_to_the_secret_path(kit):
    browser = open_desk(kit, enter=False)
    answer = browser.get(f"/enter?token={browser.session.token}")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and f"path={browser.session.base}/" in cookie
    assert browser.session.token not in answer.text


def test_the_token_is_good_once(kit):
    browser = open_desk(kit, enter=False)
    for wrong in ("", "x", browser.session.token[:-1], browser.session.token + "é"):
        assert browser.get(f"/enter?token={wrong}").status_code == 403
    assert browser.get("/").status_code == 403
    assert browser.get(f"/enter?token={browser.session.token}&token=x").status_code == 403
    assert browser.get(f"/enter?token={browser.session.token}").status_code == 200
    browser.client.cookies.clear()
    replayed = browser.get(f"/enter?token={browser.session.token}")
    assert replayed.status_code == 403 and "set-cookie" not in replayed.headers
    assert browser.get("/").status_code == 403


def test_a_session_that_nobody_uses_ends(kit, monkeypatch):
    browser = open_desk(kit)
    now = sessions.time.monotonic()
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now + 29 * 60)
    assert browser.get().status_code == 200
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now + 60 * 60)
    assert browser.get().status_code == 403 and browser.session.is_over


@pytest.mark.parametrize(
    "host", ["attacker.example", "localhost:8470", "127.0.0.1", "127.0.0.1:80", "[::1]:8470", ""]
)
def test_another_host_gets_nothing(kit, browser, host):
    """A name of the attacker's that now leads to 127.0.0.1 (DNS rebinding)."""
    proposal = put_before(kit)
    answer = browser.get(f"/proposal/{proposal.hash}", Host=host)
    assert answer.status_code == 421 and "north" not in answer.text
    assert browser.post(f"/proposal/{proposal.hash}/approve", Host=host).status_code == 421
    assert not decided(kit, proposal)


def test_a_form_of_another_page_decides_nothing(kit, browser):
    proposal = put_before(kit)
    path = f"/proposal/{proposal.hash}/approve"
    forged = (
        {"Origin": "http://attacker.example"},
        {"Origin": "http://127.0.0.1:9999"},  # the same host, for a browser: another account's page
        {"Origin": "null"},
        {"Origin": ""},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "multipart/form-data; boundary=x"},
    )
    for headers in forged:
        assert browser.post(path, **headers).status_code in (403, 415), headers
    for token in ("", "x", browser.session.csrf[:-1], browser.session.token):
        assert browser.post(path, {"csrf": token}).status_code == 403
    twice = f"csrf={browser.session.csrf}&csrf=x"
    headers = {"Origin": f"http://{HOST}", "Content-Type": "application/x-www-form-urlencoded"}
    url = browser.session.base + path
    assert browser.client.post(url, content=twice, headers=headers).status_code == 403
    assert browser.client.post(url, content=f"csrf={browser.session.csrf}").status_code == 403
    large = f"csrf={browser.session.csrf}&reason={'x' * 20_000}"
    assert browser.client.post(url, content=large, headers=headers).status_code == 413
    assert browser.get(path).status_code == 405  # a link decides nothing
    for method in ("PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"):
        assert browser.client.request(method, url).status_code in (403, 405)
    assert not decided(kit, proposal)
    assert browser.post(path).status_code == 303 and decided(kit, proposal)


def test_a_page_elsewhere_cannot_load_ours(kit, browser):
    for site in ("cross-site", "same-site"):
        assert browser.get("/", **{"Sec-Fetch-Site": site}).status_code == 403


def test_another_account_without_the_path_and_the_cookie_gets_nothing(kit, browser):
    proposal = put_before(kit)
    browser.client.cookies.clear()
    for path in ("/", "/log", f"/proposal/{proposal.hash}", "/desk.css"):
        assert browser.get(path).status_code == 403
    stolen = {"Cookie": f"{COOKIE}=x"}
    assert browser.get("/", **stolen).status_code == 403
    assert browser.post(f"/proposal/{proposal.hash}/approve").status_code == 403
    for path in ("/", "/enter", "/static/desk.css", "/robots.txt", f"/{'0' * 32}/"):
        answer = browser.client.get(path)
        assert answer.status_code == 404 and "north" not in answer.text
    assert not decided(kit, proposal)


@pytest.mark.parametrize(
    "path",
    [
        *("/../site.yaml", "/%2e%2e/%2e%2e/etc/passwd", "/proposal/..%2f..%2fsite"),
        *("/proposal/../../site.yaml", "/desk.css/../../texts.yaml", "/proposal/" + "A" * 64),
        *("/proposal/" + "0" * 63, "/proposal/" + "f" * 64, "/proposal/%00"),
        *("/log?before=-1", "/log?before=9999999999999999", "/log?before=²"),
    ],
)
def test_no_address_leads_out_of_the_site(kit, browser, path):
    put_before(kit)
    (kit.approvals.parent / "site.json").write_text("{}")
    answer = browser.get(path)
    assert answer.status_code in (404, 403) or path.startswith("/log")
    assert "superlink" not in answer.text and "root:" not in answer.text
    assert browser.post(f"{path}/approve").status_code in (403, 404, 405)


@pytest.mark.parametrize(
    "begun", [b"", b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"]
)
def test_connections_of_another_account_do_not_block_the_page(kit, begun):
    """Each idle or in the middle of a request. The steward's own stays open, and new ones are answered."""
    import httpx

    place, session = listening(0), Session()
    server = Server(kit, place, session, read_texts())
    thread = threading.Thread(target=lambda: asyncio.run(server.server.serve(sockets=[place])))
    thread.start()
    others = []
    try:
        with httpx.Client(timeout=20) as client, httpx.Client(timeout=20) as fresh:
            assert client.get(server.address).status_code == 200
            fresh.cookies = client.cookies
            for _ in range(5 * IDLE):
                others.append(socket.create_connection(place.getsockname(), timeout=20))
                others[-1].sendall(begun)
            for one in (client, fresh):
                page = one.get(f"http://{server.host}{session.base}/")
                assert page.status_code == 200 and "Nothing waits" in page.text
            assert sum(one.is_idle for one in list(server.server.server_state.connections)) <= IDLE
    finally:
        for one in others:
            one.close()
        server.close()
        thread.join(20)


def test_a_decision_that_is_none_is_refused(kit, browser):
    proposal = put_before(kit)
    for word in ("delete", "Approve", "approve%00", "__init__"):
        assert browser.decide(proposal.hash, word).status_code == 404
    assert not decided(kit, proposal)


def test_a_proposal_that_was_exchanged_under_its_hash_is_not_approved(kit, browser):
    honest, other = put_before(kit), put_before(kit, "num_rounds=9")
    path = kit.approvals / f"{honest.hash}.json"
    path.write_text((kit.approvals / f"{other.hash}.json").read_text())
    assert browser.decide(honest.hash, "approve").status_code == 409
    assert not decided(kit, honest)


def test_the_executor_may_read_what_was_decided(kit, browser):
    """Nobody else may."""
    proposal = put_before(kit)
    browser.decide(proposal.hash, "approve")
    assert (kit.approvals / f"{proposal.hash}.decision").stat().st_uid == os.geteuid()


# The command ------------------------------------------------------------------------------------------------


def test_the_command_refuses_in_one_sentence(kit, tmp_path, capsys, monkeypatch):
    def refused(*words: str) -> str:
        assert command(["site", "desk", *words]) == 2
        text = capsys.readouterr().err.strip()
        assert text.startswith("fedfrozen: ") and "\n" not in text
        return text

    assert "is no site's kit" in refused(str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot be used" in refused(str(kit.folder), "--port", str(taken.getsockname()[1]))
    assert "cannot be used" in refused(str(kit.folder), "--port", "70000")
    texts = tmp_path / "de.yaml"
    assert "cannot be read" in refused(str(kit.folder), "--texts", str(texts))
    texts.write_text("title: Titel\n")
    assert "lacks the text" in refused(str(kit.folder), "--texts", str(texts))
    (kit.folder / "policy.yaml").write_text("{}")
    assert "does not say" in refused(str(kit.folder))
    monkeypatch.setattr("fedfrozen_app.desk.command.os.geteuid", lambda: 4711)
    with pytest.raises(UserError, match="belongs to the account"):
        check_owner(kit.folder)


def test_a_translation_has_the_same_places(tmp_path):
    path = tmp_path / "de.yaml"
    path.write_text(ENGLISH.read_text().replace("{count} entries, none", "keine, none"))
    with pytest.raises(UserError, match="log_sound must hold the same words in braces"):
        read_texts(path)
    path.write_text(ENGLISH.read_text().replace("Waiting", "<b>Wartet</b>"))
    assert read_texts(path)("nav_waiting") == "&lt;b&gt;Wartet&lt;/b&gt;"
    path.write_text(ENGLISH.read_text().replace("Waiting", "`<i>`"))
    assert read_texts(path)("nav_waiting") == "<code>&lt;i&gt;</code>"
    spoken = read_texts(ENGLISH)("unread_why", problem="`<i>x</i>`")  # what is put in makes no command
    assert "<code>" not in spoken and "<i>" not in spoken


def test_every_text_is_used_and_every_used_text_is_there():
    folder = ENGLISH.parent
    sources = "".join(path.read_text() for path in [*folder.glob("templates/*.html"), *folder.glob("*.py")])
    keys = set(read_texts().texts)
    built = ("nav_", "rule_", "kind_", "key_", "column_")  # put together in a template
    unused = {
        key
        for key in keys
        if not key.startswith(built) and f"'{key}'" not in sources and f'"{key}"' not in sources
    }
    assert unused == set()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_command_serves_and_closes(kit):
    """The real command: its address works once, and closing the page ends it."""
    import httpx

    words = [sys.executable, "-P", "-m", "fedfrozen_app", "site", "desk", str(kit.folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = next(line.strip() for line in process.stdout if "http://" in line)
            base = address.partition("/enter")[0]
            with httpx.Client() as client:
                assert client.get(address).status_code == 200
                page = client.get(f"{base}/")
                assert page.status_code == 200 and "Nothing waits" in page.text
                assert httpx.get(address).status_code == 403
                csrf = page.text.split('name="csrf" value="')[1].split('"')[0]
                host = "/".join(base.split("/")[:3])
                closed = client.post(f"{base}/close", data={"csrf": csrf}, headers={"Origin": host})
                assert closed.status_code == 200
            assert process.wait(20) == 0
            assert address.partition("token=")[2] not in process.stderr.read()
        finally:
            process.kill()
