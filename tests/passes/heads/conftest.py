"""A model whose hidden states are a function of the last two tokens, run as a build would run the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.calibrate import Calibration
from optimc_passes.graph.attach import attach_weights
from optimc_passes.heads.target_model import ChatFrame, OnTokens
from optimc_passes.weights import Dense, WeightStore

FRAME = ChatFrame([1, 2], [3, 4], frozenset({3}))
EOS = frozenset({0})


@dataclass
class FakeModel:
    """A `TargetModel` over the artifact's embedding and head."""

    artifact: Artifact
    chat: ChatFrame | None = FRAME
    no_chat: str = ""
    max_seqs: int = 16
    max_seq_len: int = 256
    eos: frozenset[int] = EOS
    machine: str = "a fake"
    calls: list[int] = field(default_factory=list)
    """Prompts of each call of `generate`."""
    fail_at: int | None = None
    """The call that is cut short."""

    def __post_init__(self) -> None:
        weights = self.artifact.weights
        self.embedding = weights["model.embed_tokens.weight"].read()
        self.head = weights["lm_head.weight"].read()
        self.vocab_size, self.hidden_size = self.head.shape
        mixer = np.random.default_rng(5).standard_normal((2, self.hidden_size, self.hidden_size))
        self.mixer = (1.5 * mixer / np.sqrt(self.hidden_size)).astype(np.float32)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stop_ids: frozenset[int],
        on_tokens: OnTokens,
    ) -> None:
        self.calls.append(len(prompts))
        if self.fail_at == len(self.calls):
            raise KeyboardInterrupt
        for index, prompt in enumerate(prompts):
            rng = np.random.default_rng(seed + index)
            tokens, hidden = list(prompt), []
            while len(hidden) < max_tokens:
                state = np.tanh(self.mixer[0] @ self.embedding[tokens[-1]] + self.mixer[1] @ self.embedding[tokens[-2]])
                logits = 4 * self.head @ state
                noise = rng.gumbel(size=len(logits)) if temperature else 0.0
                hidden.append(4 * state)
                tokens.append(int(np.argmax(logits + temperature * noise)))
                if tokens[-1] in stop_ids:
                    break
            on_tokens(index, np.array(tokens[len(prompt) :]), np.array(hidden, np.float32))

    def step_costs(self, rows: Sequence[int], context: int = 256) -> dict[int, float]:
        return {count: 1e-3 * (1 + 0.03 * (count - 1)) for count in rows}


@dataclass
class FakeOpener:
    """A `ModelOpener`; `refusal` is raised instead of opening."""

    key: str = "k" * 64
    refusal: Exception | None = None
    options: dict[str, Any] = field(default_factory=dict)
    opened: list[FakeModel] = field(default_factory=list)

    @contextmanager
    def open(self, artifact: Artifact, scratch: Path) -> Iterator[FakeModel]:
        if self.refusal is not None:
            raise self.refusal
        self.opened.append(FakeModel(artifact, **self.options))
        yield self.opened[-1]


@pytest.fixture(scope="session")
def make_opener() -> type[FakeOpener]:
    return FakeOpener


@pytest.fixture
def opener() -> FakeOpener:
    return FakeOpener()


@pytest.fixture(scope="session")
def artifact(tiny_decoder) -> Artifact:
    """A finished graph, its weights, and a few rows of calibration text."""
    decoder = tiny_decoder(vocab=64)
    # What text is like: some tokens far more frequent than others.
    decoder.arrays["lm_head.weight"] *= np.linspace(1.5, 0.5, 64, dtype=np.float32)[:, None]
    rows = tuple(np.random.default_rng(1).integers(5, 64, (6, 64), dtype=np.int32))
    calibration = Calibration(rows, "c" * 64, 6 * 64, "a few rows")
    checkpoint = decoder.checkpoint()
    weights = WeightStore({name: Dense.of(array) for name, array in decoder.arrays.items()})
    graph = attach_weights(decoder.model, weights)
    return Artifact.start(checkpoint, calibration).evolve(weights=weights, graph=graph)


@pytest.fixture
def context(tmp_path, opener) -> Callable[..., PassContext]:
    """Make a context in which the fake model runs."""

    def make(**changes: Any) -> PassContext:
        facts = {"scratch": tmp_path, "open_model": lambda artifact: opener.open(artifact, tmp_path)}
        return PassContext(**(facts | changes))

    return make
