"""Pages of other origins: shut out by default, let in by name."""

from __future__ import annotations

import pytest

from optimc.errors import ConfigError
from optimc_runtime.server import ServerOptions
from optimc_runtime.server.guard import check_origins
from optimc_runtime.server.keys import KeyRing

FRIEND = "https://app.example.org"
KEY = "0123456789abcdef"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}


def cors_headers(reply):
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control")}


def test_by_default_no_origin_hears_anything(served):
    for reply in (
        served.http.get("/health", headers={"Origin": FRIEND}),
        served.http.options("/v1/completions", headers={"Origin": FRIEND, **PREFLIGHT}),
        served.http.post("/v1/completions", json={"prompt": "a"}, headers={"Origin": FRIEND}),
    ):
        assert cors_headers(reply) == {}
    assert served.http.options("/v1/completions", headers={"Origin": FRIEND, **PREFLIGHT}).status_code == 405


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_origin_may_ask_with_a_key_and_nobody_else(start_server, engine, template, stream):
    options = ServerOptions(cors_origins=(FRIEND,))
    with start_server(engine, template, options, keys=KeyRing.from_text(KEY)) as served:
        ask = {"json": {"prompt": "a", "stream": stream}}
        # A browser sends no key with a preflight.
        allowed = served.http.options("/v1/completions", headers={"Origin": FRIEND, **PREFLIGHT})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == FRIEND
        assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
        reply = served.http.post("/v1/completions", headers={"Origin": FRIEND, "Authorization": f"Bearer {KEY}"}, **ask)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == FRIEND
        assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
        # The page has to be able to read why it was refused.
        refused = served.http.post("/v1/completions", headers={"Origin": FRIEND}, **ask)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == FRIEND
        other = served.http.options("/v1/completions", headers={"Origin": "https://evil.example", **PREFLIGHT})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
        assert "access-control-allow-credentials" not in reply.headers


def test_a_star_lets_every_origin_in(start_server, engine, template):
    with start_server(engine, template, ServerOptions(cors_origins=("*",))) as served:
        reply = served.http.post("/v1/completions", json={"prompt": "a"}, headers={"Origin": "https://any.example"})
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in reply.headers


def test_what_no_browser_sends_is_a_fault():
    check_origins(["*", FRIEND, "http://localhost:3000", "http://[::1]:8080", "chrome-extension://abcdef"])
    wrong = ["https://app.example.org/", "app.example.org", "https://App.example.org", "https://*.example.org", ""]
    with pytest.raises(ConfigError, match="5 faults") as caught:
        check_origins([*wrong, FRIEND])
    assert str(caught.value).count("--cors-origin") == 5
