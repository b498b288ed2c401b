"""Measuring any server that speaks the OpenAI completions protocol, streaming.

Tokens are counted by the server's usage object; if it sends none, chunks are counted and the figures are labelled an
estimate. Prompts are token ids where the server takes them (exact length), else words, calibrated by two probes.
Conversations are words always: a server tells its answer in text. Messages always go to the chat endpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx

from optimc.errors import ConfigError, Fault, MeasureError
from optimc.measure.completion_stream import CompletionStream, error_text
from optimc.measure.driver import Clock
from optimc.measure.exchange import Exchange
from optimc.measure.load.dataset import Dataset, LinesDataset, RandomDataset, TurnsDataset
from optimc.measure.prompts import ChatPrompt, IdPrompts, Prompt, PromptSource, TextPrompts
from optimc.measure.sse import SseParser
from optimc.measure.workload import Workload
from optimc.wording import one_line

ID_RANGES = (range(1000, 30000), range(300, 380))
"""Ids tried for prompts, the first range that the server takes: inside every large vocabulary and clear of the special
tokens at either end; then inside a byte-level one."""

PROBE_WORDS = (16, 256)
"""Lengths of the two probes in words. A server whose longest prompt is shorter gets half as long a second one, and so
on, as long as it is longer than the first."""


class HttpDriver:
    """Streams from `{base_url}/v1/completions`, or `/v1/chat/completions` with `chat`.

    `model` None asks the server for its first one. `transport` replaces the network.
    """

    def __init__(
        self,
        base_url: str,
        clock: Clock,
        *,
        model: str | None = None,
        chat: bool = False,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._clock = clock
        self._model = model
        self._chat = chat
        self._api_key = api_key
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._ignore_eos = True
        self._temperature = 0.0
        self._sent = 0
        self._in_words = False

    @property
    def description(self) -> str:
        """Model and address."""
        return f"{self._model or 'model'} at {self._base_url}"

    async def prepare(self, config: Workload, run_id: str, dataset: Dataset | None = None) -> Dataset:
        """Find the model and the form of prompt the server takes. Raises MeasureError, or ConfigError for an address or
        a key that nothing can be sent with."""
        _check_address(self._base_url, self._api_key)
        if self._chat and isinstance(dataset, LinesDataset) and dataset.has_ids:
            raise ConfigError("options", [Fault("--chat", "takes text, and the --dataset holds prompts of token ids")])
        self._client = httpx.AsyncClient(
            base_url=self._base_url,
            headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else {},
            # The load generator has its own time limit, and pooled connections must not queue behind each other.
            timeout=None,
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None if config.is_open else config.concurrency
            ),
            transport=self._transport,
        )
        self._ignore_eos = config.ignore_eos
        self._temperature = config.temperature
        if self._model is None:
            self._model = await self._first_model()
        if dataset is None:
            prompts = await self._prompts(config, run_id)
            if config.dataset == "turns":
                return TurnsDataset(prompts, config, is_chat=self._chat)
            return RandomDataset(prompts, config)
        if isinstance(dataset, LinesDataset) and dataset.needs_prompts:
            return dataset.with_prompts(await self._prompts(config, run_id))
        return dataset

    async def _prompts(self, config: Workload, run_id: str) -> PromptSource:
        """Return ids where the server takes them, else words."""
        if not self._chat and config.dataset != "turns":
            fixed = replace(config, prompt_spread=0.0)
            for ids in ID_RANGES:
                probe = await self._probe(IdPrompts(fixed, f"{run_id}/probe", ids)(0))
                # A server that reads the list as several prompts, or as text, counts something else.
                if probe.prompt_tokens == config.prompt_tokens:
                    return IdPrompts(config, run_id, ids)
        return await self._calibrated_text(config, run_id)

    async def send(self, prompt: Prompt, output_tokens: int, exchange: Exchange) -> None:
        """Stream one completion. Any status but 200, an error event, or an end without finish reason is a failure."""
        assert self._client is not None, "prepare comes first"
        reader = CompletionStream(exchange)
        payload = self._payload(prompt, output_tokens)
        self._sent += 1
        exchange.sent_s = self._clock()
        while True:
            attempt = _Attempt()
            try:
                async with self._client.stream(
                    "POST", self._path(prompt), json=payload, extensions={"trace": attempt.trace}
                ) as response:
                    if response.status_code != 200:
                        detail = error_text(await response.aread())
                        exchange.fail(f"HTTP {response.status_code}: {detail}", self._clock())
                        return
                    await self._read(response, reader)
            except httpx.HTTPError as error:
                if attempt.met_closed_connection:
                    continue
                exchange.fail(f"{type(error).__name__}: {error}", self._clock())
            break
        reader.close(self._clock())

    async def _read(self, response: httpx.Response, reader: CompletionStream) -> None:
        parser = SseParser()
        async for received in response.aiter_bytes():
            now = self._clock()
            for data in parser.push(received):
                reader.read(data, now)

    def notes(self) -> list[str]:
        """Say what HTTP adds, and when prompts are words."""
        lines = ["over HTTP: queueing, network and server-sent events are inside TTFT and TPOT"]
        if self._in_words:
            lines.append("prompts are English words, their length in tokens is approximate")
        return lines

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    def _path(self, prompt: Prompt) -> str:
        is_chat = self._chat or isinstance(prompt, ChatPrompt)
        return "/v1/chat/completions" if is_chat else "/v1/completions"

    def _payload(self, prompt: Prompt, output_tokens: int) -> dict[str, Any]:
        payload: dict[str, Any] = {
            "model": self._model,
            "max_tokens": output_tokens,
            "temperature": self._temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if isinstance(prompt, ChatPrompt):
            payload["messages"] = list(prompt.messages)
            if prompt.tools:
                payload["tools"] = list(prompt.tools)
        elif self._chat:
            payload["messages"] = [{"role": "user", "content": prompt}]
        else:
            payload["prompt"] = prompt
        if self._temperature > 0:
            payload["seed"] = self._sent
        if self._ignore_eos:
            payload["ignore_eos"] = True
        return payload

    async def _first_model(self) -> str:
        assert self._client is not None
        try:
            response = await self._client.get("/v1/models", timeout=30.0)
            if response.status_code != 200:
                hint = "--api-key gives a key" if response.status_code in (401, 403) else "--model names one"
                raise MeasureError(
                    f"{self._base_url}/v1/models gives no model name (HTTP {response.status_code}: "
                    f"{error_text(response.content)}); {hint}"
                )
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise MeasureError(
                f"{self._base_url}/v1/models gives no model name ({type(error).__name__}: {one_line(error)}); "
                "is the server up? --model names one"
            ) from error

    async def _probe(self, prompt: Prompt) -> Exchange:
        exchange = Exchange(self._clock())
        await self.send(prompt, 1, exchange)
        self._sent = 0  # the load counts from here
        return exchange

    async def _calibrated_text(self, config: Workload, run_id: str) -> PromptSource:
        """Fit tokens = a + b * words to two probes. Without usage, a word is taken for a token."""
        self._in_words = True
        few_words, many_words = PROBE_WORDS
        few = await self._probe_words(config, run_id, few_words)
        if few.prompt_tokens is None and not few.succeeded:
            raise MeasureError(f"{self._base_url}: a probe of {few_words} words failed: {few.failure}")
        many = await self._probe_words(config, run_id, many_words)
        while many.prompt_tokens is None and not many.succeeded and many_words // 2 > few_words:
            many_words //= 2
            many = await self._probe_words(config, run_id, many_words)
        if many.prompt_tokens is None and not many.succeeded:
            raise MeasureError(f"{self._base_url}: a probe of {many_words} words failed: {many.failure}")
        if few.prompt_tokens is None or many.prompt_tokens is None or many.prompt_tokens <= few.prompt_tokens:
            return TextPrompts(config, run_id, lambda tokens: tokens)
        per_word = (many.prompt_tokens - few.prompt_tokens) / (many_words - few_words)
        fixed = few.prompt_tokens - per_word * few_words
        return TextPrompts(config, run_id, lambda tokens: max(1, round((tokens - fixed) / per_word)))

    async def _probe_words(self, config: Workload, run_id: str, words: int) -> Exchange:
        probe_config = replace(config, prompt_tokens=words, shared_prefix_tokens=0, prompt_spread=0.0)
        return await self._probe(TextPrompts(probe_config, f"{run_id}/probe", lambda tokens: tokens)(0))


class _Attempt:
    """What the connection pool did for one request.

    A server may close a connection that has answered just as the next request goes out on it: nobody's failure, and
    every client sends again (RFC 9112, 9.3.1). Each such attempt uses up a connection, and a new one ends it.
    """

    def __init__(self) -> None:
        self._is_new = False
        self._has_sent = False
        self._has_answer = False

    @property
    def met_closed_connection(self) -> bool:
        """Whether the request went out on a connection used before and no byte came back."""
        return self._has_sent and not self._is_new and not self._has_answer

    async def trace(self, event: str, _info: object) -> None:
        """Take note of an event, as httpx tells it."""
        self._is_new = self._is_new or event == "connection.connect_tcp.started"
        self._has_sent = self._has_sent or event == "http11.send_request_headers.started"
        self._has_answer = self._has_answer or event == "http11.receive_response_headers.complete"


def _check_address(url: str, api_key: str | None) -> None:
    """Raise ConfigError, with all faults, for what the client would only choke on later."""
    faults = []
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        faults.append(Fault("--url", f"{url!r} is no address: {one_line(error)}"))
    else:
        if parsed.scheme not in ("http", "https") or not parsed.host:
            faults.append(Fault("--url", f"must be like http://127.0.0.1:8000, got {url!r}"))
        elif parsed.port is not None and not 0 < parsed.port < 1 << 16:
            faults.append(Fault("--url", f"{url!r}: there is no port {parsed.port}"))
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        faults.append(Fault("--api-key", "holds characters that no HTTP header can carry"))
    if faults:
        raise ConfigError("options", faults)
