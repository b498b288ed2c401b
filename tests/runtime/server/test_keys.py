"""API keys: what counts as one, who gets in with which, and that no key is ever shown."""

from __future__ import annotations

import hmac
import logging

import httpx
import pytest

from optimc.errors import ConfigError
from optimc_runtime.server import ServerOptions
from optimc_runtime.server.app import ROUTES
from optimc_runtime.server.guard import check_exposure
from optimc_runtime.server.keys import KeyRing

ALICE = "alice-0123456789abcdef"
BOB = "bob-0123456789abcdefg"
RING = KeyRing.from_text(f"# staff\nalice:{ALICE}\n\n  bob : {BOB}  \n")


@pytest.mark.parametrize(
    ("authorization", "name"),
    [
        (f"Bearer {ALICE}", "alice"),
        (f"bearer {BOB}", "bob"),
        (f"Bearer  {ALICE} ", "alice"),
        (None, None),
        ("", None),
        ("Bearer", None),
        ("Bearer ", None),
        (ALICE, None),
        (f"Basic {ALICE}", None),
        (f"Bearer {ALICE[:-1]}", None),
        (f"Bearer {ALICE}x", None),
        (f"Bearer {ALICE.upper()}", None),
        (f"Bearer {ALICE} {ALICE}", None),
        (f"Bearer alice:{ALICE}", None),
        ("Bearer " + "k" * 60_000, None),
        ("Bearer schlüssel-0123456789", None),
        ("Bearer \udcff\u20ac-no-latin-1-at-all", None),
        ("Bearer " + "\0" * 22, None),
    ],
)
def test_a_header_names_the_holder_of_exactly_that_key(authorization, name):
    assert RING.name_of(authorization) == name


@pytest.mark.parametrize("key", [ALICE, BOB, "somebody-elses-0123456789", ""])
def test_every_key_is_compared_whichever_is_given(monkeypatch, key):
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    RING.name_of(f"Bearer {key}")
    assert compared == [(32, 32), (32, 32)], "digests: their length does not depend on the key"


def test_unnamed_keys_are_numbered():
    ring = KeyRing.from_text(f"{ALICE}\nbob:{BOB}\n{ALICE}2\n")
    assert ring.names == ("key1", "bob", "key3")
    assert ring.name_of(f"Bearer {ALICE}2") == "key3"


def test_keys_come_from_the_environment():
    assert KeyRing.from_environment({}) is None
    assert KeyRing.from_environment({"OPTIMC_API_KEYS": " "}) is None
    ring = KeyRing.from_environment({"OPTIMC_API_KEYS": f"{ALICE}, bob:{BOB}"})
    assert ring is not None
    assert ring.names == ("key1", "bob")
    with pytest.raises(ConfigError, match="OPTIMC_API_KEYS: 1 fault\n  entry 2: the key has 5 characters"):
        KeyRing.from_environment({"OPTIMC_API_KEYS": f"{ALICE},short"})


def test_every_bad_line_is_reported_and_none_is_shown():
    text = "\n".join(
        [
            "short:secret",
            "has space:secret-0123456789abcdef",
            f"alice:{ALICE}",
            f"alice:{BOB}",
            f"again:{ALICE}",
            "ümlaut:secret-0123456789abcdef",
            "umlaut:secrät-0123456789abcdef",
            "spaced:secret 0123456789 abcdef",
            ":secret-0123456789abcdef",
        ]
    )
    with pytest.raises(ConfigError) as caught:
        KeyRing.from_text(text, source="keys.txt")
    lines = str(caught.value).splitlines()
    assert lines[0] == "keys.txt: 8 faults"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        f"line {number}" for number in (1, 2, 4, 5, 6, 7, 8, 9)
    ]
    assert "0123456789" not in str(caught.value)
    assert "secr" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# alice:0123456789abcdef\n"])
def test_no_key_at_all_is_a_fault_not_an_open_door(text):
    with pytest.raises(ConfigError, match="holds no key"):
        KeyRing.from_text(text)


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_key(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(f"\ufeffalice:{ALICE}\r\nbob:{BOB}\r\n".encode())
    ring = KeyRing.from_file(path)
    assert ring.names == ("alice", "bob")
    assert ring.name_of(f"Bearer {ALICE}") == "alice"


def test_a_missing_or_unreadable_file_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="--api-key-file: .*gone.txt: No such file"):
        KeyRing.from_file(tmp_path / "gone.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfesecret-key-bytes")
    with pytest.raises(ConfigError, match="not UTF-8") as caught:
        KeyRing.from_file(tmp_path / "binary")
    assert caught.value.__cause__ is None


@pytest.fixture
def guarded(start_server, engine, template):
    with start_server(engine, template, ServerOptions(), keys=RING) as served:
        yield served


def test_what_is_anybodys_business_and_what_is_not(guarded, error_of):
    message = {"role": "user", "content": "hi"}
    wants_key = {
        "/v1/chat/completions": {"messages": [message]},
        "/v1/completions": {"prompt": "hi"},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [20]},
        "/v1/models": None,
        "/v1/models/scripted": None,
        "/metrics": None,
        "/dashboard.json": None,
    }
    open_to_all = ["/health", "/health/live", "/health/ready", "/openapi.json", "/", "/page/app.js"]

    def ask(path, headers):
        body = wants_key.get(path)
        return guarded.http.request("POST" if body else "GET", path, json=body, headers=headers)

    stranger, bob = {"Authorization": "Bearer somebody-elses-0123456789"}, {"Authorization": f"Bearer {BOB}"}
    for path in wants_key:
        for headers in ({}, stranger):
            reply = ask(path, headers)
            assert reply.status_code == 401, path
            assert reply.headers["www-authenticate"] == "Bearer"
            assert error_of(reply)["code"] == "invalid_api_key"
        assert ask(path, bob).status_code == 200, path
    for path in open_to_all:
        assert [ask(path, headers).status_code for headers in ({}, stranger, bob)] == [200] * 3, path
    routes = {path for _, path, _ in ROUTES}
    asked = {"/v1/models/{model:path}", "/page/{name}", *wants_key, *open_to_all}
    assert routes <= asked, "a new route is of one kind or the other"


def test_the_engine_hears_on_whose_behalf(guarded):
    reply = guarded.http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": f"Bearer {ALICE}"})
    assert reply.status_code == 200
    assert guarded.engine.submitted[-1].terms.tenant == "alice"


def test_a_stranger_is_refused_before_the_body_is_read(guarded):
    with guarded.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")


def test_a_stranger_who_sends_9_mib_first_still_reads_the_401(guarded):
    reply = guarded.http.post("/v1/completions", content=b" " * (9 * 1024 * 1024))
    assert reply.status_code == 401
    assert guarded.http.get("/health").status_code == 200


def test_no_key_reaches_a_log_or_an_answer(guarded, caplog):
    guesses = [ALICE, BOB, "guess-0123456789abcdef", "schl\u00fcssel-0123456789"]
    with caplog.at_level(logging.DEBUG):
        replies = [
            httpx.post(
                f"{guarded.url}/v1/completions",
                json={"prompt": "a", "n": n, "user": guess},
                headers={"Authorization": f"Bearer {guess}".encode("latin-1")},
                trust_env=False,
            )
            for guess in guesses
            for n in (1, 0)
        ]
    assert [reply.status_code for reply in replies] == [200, 400, 200, 400, 401, 401, 401, 401]
    shown = caplog.text + "".join(f"{reply.text}{reply.headers}" for reply in replies)
    assert len(caplog.records) >= len(replies)
    assert not [guess for guess in guesses if guess in shown]


@pytest.mark.parametrize(
    ("host", "is_safe"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.168.1.5", False),
        ("8.8.8.8", False),
        ("127.0.0.1.example.org", False),
        ("example.org", False),
        ("127.1", False),
    ],
)
def test_an_address_others_can_reach_needs_a_key_or_a_flag(host, is_safe):
    check_exposure(host, RING, allow=False)
    check_exposure(host, None, allow=True)
    if is_safe:
        check_exposure(host, None, allow=False)
    else:
        with pytest.raises(ConfigError, match="--host: .*reachable from outside.*--api-key-file.*--insecure-no-key"):
            check_exposure(host, None, allow=False)
