"""Training heads: their distributions over the draft vocabulary are drawn to those of the model itself.

Head k reads the state a root token was sampled from, and the root's embedding; its target is what the model says k
places later, at temperature 1. Embeddings are scaled to the size of states, or that half would learn slowly; the factor
ends up in the matrix. Where the token that came is not in the draft vocabulary the
position does not count: on average that weighs it by the model's mass inside. A head starts as the model's output head.

Nearly all of a step's arithmetic is logits. So a step looks at some columns of the draft vocabulary: those its targets
are about, and a few drawn from the rest, which count for all they were drawn from.

Letters: N positions, K heads, d hidden size, V' draft vocabulary.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimc.progress import Progress
from optimc.storage import replacing, storing
from optimc_passes.heads.batches import SEGMENT, Batch, Segments
from optimc_passes.heads.config import MedusaConfig
from optimc_passes.heads.measure import accepted_length
from optimc_passes.heads.positions import Positions

STATE = "train.pt"
SAVE_S = 60.0
"""Seconds between two states that a later build can go on from."""
_CHECKS = 12
"""Times the heads are looked at on held-out text."""
_PATIENCE = 3
"""Looks without a better one, in the second half of the way, after which there is nothing left to gain."""
_CHECKED_POSITIONS = 4096
_DECAY = 0.8
"""A head's weight in the loss, relative to the one before it: its guesses count only where theirs were right."""
_WARM_UP = 0.02
"""Share of the steps in which the learning rate rises."""


_LIKELY_COLUMNS, _DRAWN_COLUMNS = 1536, 512
"""Columns of a step: those with most of its targets' mass, and those drawn from the others."""


class Targets(NamedTuple):
    """What does not change: how hidden states become logits over the draft vocabulary, and how tokens look."""

    projection: Tensor
    """float32 [V', d], rows of the model's output head."""
    embedding: Tensor | None
    """float32 [V, d], as the model reads it; None if heads do not read it."""
    scale: float
    """What embeddings are multiplied with, so that they are as large as states."""
    places: Tensor
    """int64 [V]: a token's place in the draft vocabulary, -1 outside."""


class HeadParameters:
    """The tensors that are trained."""

    def __init__(self, config: MedusaConfig, width: int, projection: Tensor) -> None:
        heads, inputs = config.heads, 2 * width if config.conditioned else width
        self.width = width
        self.first = torch.zeros(heads, width, inputs)
        """[K, d, 2d] or [K, d, d]."""
        self.more = torch.zeros(config.blocks - 1, heads, width, width)
        self.biases = torch.zeros(config.blocks, heads, width)
        self.own = projection.repeat(heads, 1, 1) if config.projection == "own" else None
        """[K, V', d]"""

    def named(self) -> dict[str, Tensor]:
        """Return all of them."""
        tensors = {"first": self.first, "more": self.more, "biases": self.biases}
        return tensors if self.own is None else {**tensors, "own": self.own}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over values, in place."""
        with torch.no_grad():
            for name, tensor in self.named().items():
                tensor.copy_(tensors[name])

    def copy(self) -> dict[str, Tensor]:
        """Return their values as they are now."""
        return {name: tensor.detach().clone() for name, tensor in self.named().items()}

    def hidden(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """Return what each head's projection multiplies, [K, N, d]."""
        read = hidden if embedded is None else torch.cat([hidden, embedded], dim=1)
        heads = self.first.shape[0]
        linear = _product(read, self.first.flatten(0, 1)).view(-1, heads, self.width).transpose(0, 1)
        x = hidden[None] + torch.nn.functional.silu(linear + self.biases[0][:, None])
        for block, weight in enumerate(self.more):
            linear = torch.stack([_product(rows, matrix) for rows, matrix in zip(x, weight, strict=True)])
            x = x + torch.nn.functional.silu(linear + self.biases[block + 1][:, None])
        return x


@dataclass
class TrainState:
    """Where training stands; what is written so that it can go on."""

    step: int = 0
    seconds: float = 0.0
    best: float = -1.0
    best_step: int = 0
    checks_since: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Trained:
    """Heads, and how they came to be."""

    tensors: dict[str, NDArray[np.float32]]
    epochs: float
    stopped_because: str
    resumed_at_step: int | None
    history: tuple[tuple[int, float], ...]
    seconds: float


class Trainer:
    """One training. Same samples, options and number of threads: same heads, however often it is cut short."""

    def __init__(
        self, config: MedusaConfig, segments: Segments, heldout: Positions, targets: Targets, progress: Progress
    ) -> None:
        self._config, self._segments, self._heldout = config, segments, heldout
        self._targets, self._progress = targets, progress
        self._per_step = max(1, config.batch_tokens // SEGMENT)
        per_epoch = max(1, len(segments) // self._per_step)
        self._steps = max(1, round(config.epochs * per_epoch))
        self._positions_per_step = segments.positions / per_epoch
        self._per_epoch = per_epoch
        self._heads = HeadParameters(config, targets.projection.shape[1], targets.projection)
        self._optimizer = torch.optim.AdamW(
            [tensor.requires_grad_() for tensor in self._heads.named().values()],
            lr=config.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        self._best = self._heads.copy()
        # Half the bytes and, where the machine multiplies bfloat16, a fraction of the time; sums stay float32.
        self._low = targets.projection.to(torch.bfloat16)

    def run(self, folder: Path | None) -> Trained:
        """Train until the text was gone through, held-out text gains no more, or the minutes are over.

        `folder` holds the state an earlier build was cut short at, and takes this one's.
        """
        state = TrainState()
        resumed = folder is not None and self._load(folder / STATE, state)
        first = state.step
        saved = time.monotonic()
        every = max(1, self._steps // _CHECKS)
        stopped = "the text was gone through"
        if not resumed:
            self._check(state)
        for batch in self._segments.steps(self._per_step, state.step, self._steps):
            begin = time.monotonic()
            progress = max(state.step / self._steps, state.seconds / (60 * self._config.minutes))
            if progress >= 1:
                stopped = f"{self._config.minutes:g} minutes were over"
                break
            self._step(batch, progress, state.step)
            state.step += 1
            if state.step % every == 0 or state.step == self._steps:
                self._check(state)
            state.seconds += time.monotonic() - begin
            self._progress(state.step, self._steps, "train")
            if state.checks_since >= _PATIENCE and 2 * state.step >= self._steps:
                stopped = f"held-out text gained nothing in {_PATIENCE} looks"
                break
            if folder is not None and time.monotonic() - saved >= SAVE_S:
                self._save(folder / STATE, state)
                saved = time.monotonic()
        if state.step % every and state.step < self._steps:
            self._check(state)
        tensors = {name: tensor.numpy() for name, tensor in self._best.items()}
        tensors["first"][:, :, self._heads.width :] *= np.float32(self._targets.scale)
        return Trained(
            tensors,
            state.step / self._per_epoch,
            stopped,
            first if resumed else None,
            tuple(state.history),
            state.seconds,
        )

    def _step(self, batch: Batch, progress: float, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * _rate(progress)
        self._optimizer.zero_grad(set_to_none=False)
        hidden, roots = batch.hidden.flatten(0, 1), batch.roots.flatten()
        x = self._heads.hidden(hidden, self._embedded(roots))
        gradients = self._gradients(x.detach(), batch, step)
        x.backward(torch.stack(gradients))  # type: ignore[no-untyped-call]
        self._optimizer.step()

    @torch.no_grad()
    def _gradients(self, x: Tensor, batch: Batch, step: int) -> list[Tensor]:
        """Return the loss's gradient at what each head's projection multiplies, [N, d] each."""
        segments, later = batch.labels.shape
        wanted = torch.softmax((batch.later.flatten(0, 1).to(torch.bfloat16) @ self._low.T).float(), dim=1)
        columns, counted = self._columns(wanted, step)
        wanted = (wanted[:, columns] * counted.exp()).view(segments, later, -1)
        shared = self._low[columns]
        gradients = []
        for head, rows in enumerate(x.to(torch.bfloat16)):
            labels = batch.labels[:, head : head + SEGMENT].flatten()
            counts = (labels >= 0) & (self._targets.places[labels.clamp(min=0)] >= 0)
            target = wanted[:, head : head + SEGMENT].flatten(0, 1)
            own = self._heads.own
            low = shared if own is None else own[head, columns].to(torch.bfloat16)
            gradient = torch.softmax((rows @ low.T).float() + counted, dim=1)
            gradient.mul_(target.sum(dim=1, keepdim=True)).sub_(target)
            gradient *= (counts.float() * (_DECAY**head / len(rows)))[:, None]
            lowered = gradient.to(torch.bfloat16)
            if own is not None:
                if own.grad is None:
                    own.grad = torch.zeros_like(own)
                own.grad[head, columns] += (lowered.T @ rows).float()
            gradients.append((lowered @ low).float())
        return gradients

    def _columns(self, wanted: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the columns a step looks at, and what is added to their logits: log of how many each stands for."""
        size = wanted.shape[1]
        others = size - _LIKELY_COLUMNS
        if others <= _DRAWN_COLUMNS:
            return torch.arange(size), torch.zeros(size)
        order = wanted.sum(dim=0).argsort(descending=True, stable=True)
        drawn = np.random.default_rng([self._config.seed, 3, step]).choice(others, _DRAWN_COLUMNS, replace=False)
        counted = torch.zeros(_LIKELY_COLUMNS + _DRAWN_COLUMNS)
        counted[_LIKELY_COLUMNS:] = math.log(others / _DRAWN_COLUMNS)
        return torch.cat([order[:_LIKELY_COLUMNS], order[_LIKELY_COLUMNS:][torch.from_numpy(drawn)]]), counted

    def _embedded(self, tokens: Tensor) -> Tensor | None:
        return None if self._targets.embedding is None else self._targets.embedding[tokens] * self._targets.scale

    @torch.no_grad()
    def _check(self, state: TrainState) -> None:
        """Look at held-out text; keep the heads if they are the best so far."""
        ranks = np.empty((len(self._heldout), self._config.heads), np.int64)
        for start in range(0, len(self._heldout), 512):
            places = np.arange(start, min(start + 512, len(self._heldout)))
            hidden, _ = self._heldout.inputs(places)
            came = torch.from_numpy(self._heldout.next_tokens(places, self._config.heads))
            roots = torch.from_numpy(self._heldout.roots(places))
            x = self._heads.hidden(torch.from_numpy(hidden), self._embedded(roots))
            for head, rows in enumerate(x):
                low = self._low if self._heads.own is None else self._heads.own[head].to(torch.bfloat16)
                first = (rows.to(torch.bfloat16) @ low.T).argmax(dim=1)
                right = self._targets.places[came[:, head].clamp(min=0)] == first
                ranks[places, head] = np.where((right & (came[:, head] >= 0)).numpy(), 0, 1)
        reached = accepted_length(ranks)
        seen = round(state.step * self._positions_per_step)
        state.history.append((seen, float((ranks[:, 0] == 0).mean()) if len(ranks) else 0.0))
        if reached > state.best:
            state.best, state.best_step, state.checks_since = reached, state.step, 0
            self._best = self._heads.copy()
        else:
            state.checks_since += 1

    def _save(self, path: Path, state: TrainState) -> None:
        written = {
            "plan": self._plan(),
            "state": vars(state),
            "heads": self._heads.copy(),
            "best": self._best,
            "optimizer": self._optimizer.state_dict(),
        }
        with storing("unfinished training", path), replacing(path) as file:
            torch.save(written, file)

    def _load(self, path: Path, state: TrainState) -> bool:
        """Take over an earlier state; False if there is none, or it is harmed or of another training."""
        try:
            written: dict[str, Any] = torch.load(path, weights_only=True)
            if written["plan"] != self._plan():
                return False
            found = TrainState(**written["state"])
            self._heads.load(written["heads"])
            self._optimizer.load_state_dict(written["optimizer"])
            self._best = written["best"]
        except Exception:
            return False
        found.history = [(int(seen), float(share)) for seen, share in found.history]
        vars(state).update(vars(found))
        return True

    def _plan(self) -> list[int]:
        """Return what must agree between the state and this training, beyond the key of the folder."""
        return [self._steps, self._per_step, self._segments.positions, len(self._heldout), torch.get_num_threads()]


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return rows @ matrix.T, multiplied in bfloat16."""
    return (rows.to(torch.bfloat16) @ matrix.to(torch.bfloat16).T).float()


def _rate(progress: float) -> float:
    """Return the learning rate at some share of the way, relative to its peak."""
    if progress < _WARM_UP:
        return max(progress, 1e-3) / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - _WARM_UP) / (1 - _WARM_UP))))


def places_of(vocabulary: NDArray[np.int32] | None, vocab_size: int) -> Tensor:
    """Return each token's place in the draft vocabulary, int64 [V]; -1 outside."""
    if vocabulary is None:
        return torch.arange(vocab_size)
    places = torch.full((vocab_size,), -1)
    places[torch.from_numpy(vocabulary.astype(np.int64))] = torch.arange(len(vocabulary))
    return places
