"""Requests nobody should send: broken bodies, wrong values, mischief with headers, grammars made to hurt."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.0, -0.0, 1e-320, 1e9, -1e9, 1e308, 2**31, 2**63, -(2**63), 10**400, "", "x",
    "0", "null", "\x00", "\ud800", "é" * 500, "🏴‍☠️", "x" * 20_000, [], {}, [None], [[]], [{}], {"": ""},
    {"type": "text"}, [""], ["a", "b"], [1, 2, 3], [-1], [10**9], [2**70], [[1, 2], [3]], [["a"]], ["a"] * 300,
    {"1": 1e9}, {"a": 1}, {"0": 100}, [{"role": "user", "content": "hi"}], [{"role": "user"}],
    [{"role": "\x00", "content": ""}], {"type": "json_object"}, {"include_usage": True}, "auto", "required", "none",
    "off", float("nan"), float("inf"), -float("inf"),
)  # fmt: skip
"""What fields are given instead of what they want."""

FIELDS = (
    "model", "messages", "prompt", "n", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "cache_salt",
    "return_token_ids", "speculation", "logprobs", "top_logprobs", "echo", "best_of", "suffix", "response_format",
    "guided_regex", "grammar", "tools", "tool_choice", "parallel_tool_calls", "priority", "user", "metadata",
    "functions", "tokens", "add_special_tokens", "unheard_of",
)  # fmt: skip


def _deep(depth: int, inner: dict[str, Any]) -> dict[str, Any]:
    schema = inner
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HURTFUL: tuple[dict[str, Any], ...] = (
    {"guided_regex": "(a{1,1000}){1,1000}"},
    {"guided_regex": "(" * 500 + "a" + ")" * 500},
    {"guided_regex": "(?=a)b"},
    {"guided_regex": "[" + "a-z" * 4000},
    {"guided_regex": "(.*a){25}"},
    {"guided_regex": "\\p{Nothing}"},
    {"grammar": 'start: start start | "a" | '},
    {"grammar": "start: a\na: b\nb: a"},
    {"grammar": "start: " + "(" * 1000},
    {"grammar": 'start: "' + "x" * 70_000 + '"'},
    {"grammar": '%json {"$ref": "http://localhost/"}'},
    {"grammar": "start: <[999999999]>"},
    {"grammar": "\x00"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _deep(60, {"type": "null"})}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"$ref": "file:///etc/passwd"}},
        }
    },
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no such"}}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"enum": [f"{n}" * 12 for n in range(1500)]}},
        }
    },
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "array", "minItems": 10**9, "maxItems": 1}},
        }
    },
    {"response_format": {"type": "json_object"}, "guided_regex": "a"},
    {"response_format": {"type": "xml"}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}], "tool_choice": "required"},
    {"tools": [{"type": "function", "function": {"name": "../../etc"}}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}] * 200},
    {"tool_choice": {"type": "function", "function": {"name": "g"}}},
)


class Hostile:
    """Draws raw HTTP requests, the same for the same seed. `headers` are sent along with those that are HTTP at all."""

    def __init__(self, seed: int, headers: str = "") -> None:
        self._random = Random(seed)
        self._headers = headers
        self._kinds: tuple[Callable[[], bytes], ...] = (
            self._wrong_values, self._wrong_values, self._wrong_values, self._hurtful, self._broken_json,
            self._bytes, self._deep, self._no_http, self._headers_wrong, self._chunked, self._path,
            self._conversation,
        )  # fmt: skip

    def draw(self) -> bytes:
        """Return the bytes of the next request."""
        return self._random.choice(self._kinds)()

    def _http(self, path: str, body: bytes, method: str = "POST", extra: str = "", length: str | None = None) -> bytes:
        length = str(len(body)) if length is None else length
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{self._headers}{extra}"
        return f"{head}Connection: close\r\n\r\n".encode("utf-8", "surrogateescape") + body

    def _json(self, path: str, body: dict[str, Any]) -> bytes:
        return self._http(path, json.dumps(body).encode(), extra="Content-Type: application/json\r\n")

    def _valid(self) -> tuple[str, dict[str, Any]]:
        """Return a request with nothing wrong, and little to compute, to spoil."""
        path = self._random.choice((CHAT, CHAT, COMPLETIONS, COMPLETIONS, TOKENIZE, DETOKENIZE))
        few: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
        messages = [{"role": "user", "content": "hi"}]
        body = {
            CHAT: {**few, "messages": messages}, COMPLETIONS: {**few, "prompt": "hi"}, TOKENIZE: {"prompt": "hi"},
            DETOKENIZE: {"tokens": [70]},
        }[path]  # fmt: skip
        return path, body

    def _wrong_values(self) -> bytes:
        path, body = self._valid()
        for _ in range(self._random.randint(1, 3)):
            body[self._random.choice(FIELDS)] = self._random.choice(VALUES)
        return self._json(path, body)

    def _hurtful(self) -> bytes:
        path, body = self._valid()
        return self._json(path, {**body, **self._random.choice(HURTFUL)})

    def _conversation(self) -> bytes:
        draw = self._random.choice
        keys = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "x")
        roles = ("user", "assistant", "system", "tool", "developer", "function", "", None)
        messages = [
            {**{draw(keys): draw(VALUES) for _ in range(self._random.randint(0, 3))}, "role": draw(roles)}
            for _ in range(self._random.randint(0, 4))
        ]
        return self._json(CHAT, {"messages": messages, "max_tokens": 2})

    def _broken_json(self) -> bytes:
        path, body = self._valid()
        text = bytearray(json.dumps(body).encode())
        for _ in range(self._random.randint(1, 4)):
            place = self._random.randrange(len(text))
            text[place : place + self._random.randint(0, 3)] = self._random.randbytes(self._random.randint(0, 3))
        return self._http(path, bytes(text))

    def _bytes(self) -> bytes:
        return self._http(self._valid()[0], self._random.randbytes(self._random.randint(0, 2000)))

    def _deep(self) -> bytes:
        opening, closing = self._random.choice((("[", "]"), ('{"a":', "}")))
        depth = self._random.choice((50, 1000, 100_000))
        nested = opening * depth + "1" + (closing * depth if self._random.random() < 0.5 else "")
        return self._http(CHAT, f'{{"messages": {nested}}}'.encode())

    def _no_http(self) -> bytes:
        lines: tuple[bytes, ...] = (
            self._random.randbytes(200) + b"\r\n\r\n", b"GET\r\n\r\n", b"\r\n\r\n\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300) + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\x00: x\r\n\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        )  # fmt: skip
        return self._random.choice(lines)

    def _headers_wrong(self) -> bytes:
        path, body = self._valid()
        data = json.dumps(body).encode()
        draw = self._random.choice
        extra = draw(
            (
                "Content-Type: text/plain\r\n", "Content-Type: application/json; charset=utf-16\r\n",
                "Expect: 100-continue\r\n", "Content-Encoding: gzip\r\n", "Authorization: Basic eDp5\r\n",
                "Authorization: Bearer \x7f\udcff\r\n", "X-Request-Id: " + "x" * 5000 + "\r\n",
                "X-Request-Id: a b\tc\r\n", "Upgrade: websocket\r\nConnection: upgrade\r\n",
                "Transfer-Encoding: gzip\r\n", "Origin: null\r\n", "Range: bytes=0-0\r\n",
                "X: " + "y" * 3000 + "\r\n",
            )
        )  # fmt: skip
        length = draw((None, None, "1", str(10**12), "x", "+5", "0"))
        return self._http(path, data, extra=extra, length=length)

    def _chunked(self) -> bytes:
        body = self._random.choice(
            (
                b"5\r\n{\"a\":\r\n0\r\n\r\n", b"zz\r\n", b"-1\r\n\r\n", b"ffffffffffffffff\r\nx\r\n0\r\n\r\n",
                b"0\r\n\r\n", b"2;x=y\r\n{}\r\n0\r\n\r\n",
            )
        )  # fmt: skip
        head = f"POST {self._valid()[0]} HTTP/1.1\r\nHost: x\r\n{self._headers}Transfer-Encoding: chunked\r\n"
        return head.encode() + b"Connection: close\r\n\r\n" + body

    def _path(self) -> bytes:
        draw = self._random.choice
        path = draw(
            (
                "/", "//", "/v1", "/v1/models/../../etc/passwd", "/v1/models/%00", "/v1/models/" + "a" * 3000,
                "/page/../keys.py", "/page/%2e%2e%2fkeys.py", "/page/app.js/", "/page/%ff",
                "/metrics?x=" + "y" * 500, "/openapi.json", "*", "http://elsewhere/v1/models", "/health/../health",
                "/dashboard.json", "/v1/chat/completions/", "/é",
            )
        )  # fmt: skip
        method = draw(("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "POST", "BREW"))
        return self._http(path, b"", method=method)
