"""What is refused before anything of a request is looked at, without a server."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from kvq.errors import ConfigError
from kvq.server.http import guard
from kvq.server.http.guard import Access, Guard
from kvq.server.http.incoming import FREE, MAX_BODY
from kvq.server.http.problems import Problem

PAGE = "https://a.org"


COUNTED = []


def ask(access, *, method="GET", path="/health", answer=200, check=lambda path, tenant: None, **headers):
    """(status, headers, the method and the tenant that the application saw)."""
    sent, seen = [], []

    async def app(scope, receive, send):
        seen.append((scope["method"], scope["kvq_tenant"]))
        scope["route"] = SimpleNamespace(path=path)
        await send({"type": "http.response.start", "status": answer, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    def counted(path, problem):
        COUNTED.append((path, problem.ending))

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": [(b"host", b"kvq.org"), *given]}
    asyncio.run(Guard(app, access=access, check=check, count=counted)(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]), seen


@pytest.mark.parametrize(
    ("origins", "origin", "status"),
    [((), PAGE, 403), ((PAGE,), PAGE, 200), ((PAGE,), "https://b.org", 403), (("*",), "https://b.org", 200)],
)
def test_pages_of_other_origins_need_to_be_named(origins, origin, status):
    assert ask(Access(origins=frozenset(origins)), origin=origin)[0] == status


@pytest.mark.parametrize("origin", ["a.org", "https://a.org/", "https://a.org/path", "https://", ""])
def test_what_is_no_origin_is_said_at_once(origin):
    with pytest.raises(ConfigError, match="is no origin"):
        Access(origins=frozenset({origin}))


def test_tenants_are_numbered_by_the_place_of_their_keys():
    access = Access(api_keys=("zeta", "alpha"))
    for place, key in enumerate(access.api_keys):
        assert ask(access, authorization=f"Bearer {key}")[2] == [("GET", f"key-{place}")]
    assert ask(access, x_api_key="beta")[0] == 401


def test_a_head_is_a_get_without_a_body():
    assert ask(Access(), method="HEAD")[2] == [("GET", "")]


def test_what_is_refused_here_is_counted_as_it_ended_unless_it_only_looks():
    COUNTED.clear()
    ask(Access(api_keys=("k",)), method="POST", path="/v1/completions", x_api_key="another")
    ask(Access(), method="POST", path="/v1/completions", content_length="9" * 8)
    ask(Access(api_keys=("k",)), path="/metrics")
    ask(Access(), method="POST", path="/v1/completions", answer=400)  # the application counts its own
    assert COUNTED == [("/v1/completions", "invalid")] * 2


def test_what_is_refused_in_any_case_is_refused_before_the_body():
    def full(path, tenant):
        assert (path, tenant) == ("/v1/completions", "key-0")
        raise Problem(503, "full", retry_after_s=3)

    access = Access(api_keys=("k",))
    status, headers, seen = ask(access, path="/v1/completions", check=full, x_api_key="k", content_length="9")
    assert (status, headers[b"retry-after"], seen) == (503, b"3", [])


@pytest.mark.parametrize(
    ("path", "without_engine"),
    [
        *((path, "DEBUG") for path in ("/health", "/health/live", "/health/ready", "/metrics", "/pool")),
        ("/health/deep", "INFO"),  # nothing else tells of an engine that does not generate
    ],
)
def test_probes_are_told_of_at_debug_only_unless_they_fail(caplog, path, without_engine):
    with caplog.at_level(logging.DEBUG, "kvq"):
        for answer in (200, 503, 500):
            ask(Access(), path=path, answer=answer)
        ask(Access(), path="/v1/models", answer=200)
        ask(Access(api_keys=("k",)), path="/metrics")
    told = [(record.levelname, record.fields["route"], record.fields["status"]) for record in caplog.records]
    assert told == [
        ("DEBUG", path, 200),
        (without_engine, path, 503),
        ("INFO", path, 500),
        ("INFO", "/v1/models", 200),
        ("INFO", "unknown", 401),
    ]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_length": "9" * 8}, 413),
        ({"content_length": "2", "transfer_encoding": "chunked"}, 400),
        ({"x_long": "a" * 70_000}, 431),
    ],
)
def test_what_the_head_alone_gives_away_is_refused(headers, status):
    found, sent, seen = ask(Access(), **headers)
    assert (found, seen) == (status, [])
    assert sent[b"connection"] == b"close"


def test_refusals_without_end_write_so_many_lines_and_how_many_were_left_out(monkeypatch):
    lines = []
    monkeypatch.setattr(
        guard,
        "log_event",
        lambda _name, *, level, **fields: lines.append((level, fields["refusals_left_out"])),
    )
    now = [0.0]
    monkeypatch.setattr(guard, "perf_counter", lambda: now[0])

    async def app(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 404, "headers": []})

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_message):
        pass

    async def ask_often(guarded, count):
        for _ in range(count):
            await guarded({"type": "http", "method": "GET", "path": "/x", "headers": []}, receive, send)

    guarded = Guard(app, access=Access())
    asyncio.run(ask_often(guarded, 2000))
    assert [level for level, _ in lines] == [logging.INFO] * 500 + [logging.DEBUG] * 1500
    lines.clear()
    now[0] = 60.0
    asyncio.run(ask_often(guarded, 301))
    assert lines == [(logging.INFO, 1500)] + [(logging.INFO, None)] * 299 + [(logging.DEBUG, None)]


@pytest.mark.parametrize(
    ("method", "path", "most"),
    [("POST", "/v1/completions", MAX_BODY), ("POST", "/health/live", FREE), ("GET", "/v1/models", FREE)],
)
def test_where_nobody_reads_a_body_it_takes_no_room(method, path, most):
    access = Access(api_keys=("a",))
    options = {"method": method, "path": path, "x_api_key": "a"}
    assert ask(access, content_length=str(most), **options)[0] == 200
    assert ask(access, content_length=str(most + 1), **options)[0] == 413
