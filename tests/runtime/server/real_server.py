"""A real engine with a scripted model behind a real server, and the official client to ask it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from optimc_runtime.chat_template import ChatTemplate
from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine
from optimc_runtime.server import HttpServer, ServerOptions, build_app
from optimc_runtime.tokenizer import Tokenizer

EOS_TEXT = "<|end|>"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges; printable letters only, so that every token is one character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS_TEXT])
    return Tokenizer(backend.to_str().encode(), {"eos_token": EOS_TEXT})


@dataclass
class RealServer:
    url: str
    engine: Engine
    executor: Any
    client: openai.OpenAI
    """Checks every answer against the client's types."""
    lenient_client: openai.OpenAI
    http: httpx.Client
    tokenizer: Tokenizer
    failing: dict[str, int] = field(default_factory=dict)

    @property
    def eos(self) -> int:
        token_id = self.tokenizer.token_id(EOS_TEXT)
        assert token_id is not None
        return token_id

    def letters_only(self) -> dict[str, float]:
        """A bias that keeps the scripted model to one-byte characters, so that texts and tokens line up."""
        return {str(self.tokenizer.encode(char)[0]): 50.0 for char in "abcdefgh"}

    def fail_in(self, steps: int) -> None:
        """Let the executor fail once, `steps` steps from now."""
        self.failing["left"] = steps

    def before_step(self, _plan: Any) -> None:
        if "left" in self.failing:
            self.failing["left"] -= 1
            if self.failing["left"] < 0:
                del self.failing["left"]
                raise RuntimeError("injected")

    def check_idle(self) -> None:
        """No request is left, and every block is free or merely cached; within a step of the last answer."""
        for _ in range(200):
            stats = self.engine.stats()
            if (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0):
                break
            time.sleep(0.01)
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


@contextmanager
def running(
    scripted: Any, *, num_blocks: int = 256, config: EngineConfig | None = None, **limits: int
) -> Iterator[RealServer]:
    """Serve a plan of these `limits`, some of which have defaults."""
    tokenizer = byte_tokenizer()
    eos = tokenizer.token_id(EOS_TEXT)
    manifest = scripted.manifest(
        vocab_size=tokenizer.vocab_size,
        eos=(eos,),
        **{"max_seq_len": 128, "max_step_tokens": 64, "max_seqs": 8, **limits},
    )
    executor = scripted.Executor(num_blocks, 4, tokenizer.vocab_size, manifest.limits)
    engine = Engine(executor, manifest, tokenizer, config or EngineConfig())
    engine.start()
    ready = threading.Event()
    app = build_app(engine, model_name="tiny", chat_template=ChatTemplate(TEMPLATE), options=ServerOptions())
    server = HttpServer(app, port=0, on_ready=lambda _url: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(10)
        common: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 20}
        with (
            openai.OpenAI(**common, _strict_response_validation=True) as strict,
            openai.OpenAI(**common) as lenient,
            httpx.Client(base_url=server.url, timeout=20, trust_env=False) as http,
        ):
            real = RealServer(server.url, engine, executor, strict, lenient, http, tokenizer)
            executor.before_step = real.before_step
            yield real
    finally:
        server.stop()
        thread.join(15)
        engine.close()
        assert not thread.is_alive()
