"""The arithmetic of a training step: what it looks at, and what it stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optimc.progress import no_progress
from optimc_passes.heads import trainer
from optimc_passes.heads.batches import SEGMENT, Segments
from optimc_passes.heads.config import MedusaConfig
from optimc_passes.heads.draft_vocab import draft_vocabulary
from optimc_passes.heads.positions import Positions
from optimc_passes.heads.samples import Sample, SampleStore
from optimc_passes.heads.trainer import Targets, Trainer, places_of

WIDTH, VOCAB = 16, 120


@pytest.fixture
def samples(tmp_path):
    """Random states, and tokens drawn from what they say."""
    rng = np.random.default_rng(0)
    head = rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
    store = SampleStore(tmp_path, WIDTH)
    found = []
    for length in (40, 7, 33, 2, 64, 50):
        hidden = rng.standard_normal((length, WIDTH)).astype(np.float32)
        found.append(Sample(np.argmax(hidden @ head.T, axis=1), hidden))
    store.append("chat", found)
    return store.open(), head


def make_trainer(samples, head, **options):
    config = MedusaConfig(heads=2, batch_tokens=4 * SEGMENT, **options)
    segments = Segments(samples, range(4), 2, 0)
    embedding = torch.from_numpy(np.random.default_rng(1).standard_normal((VOCAB, WIDTH)).astype(np.float32))
    targets = Targets(torch.from_numpy(head), embedding, 1.0, places_of(None, VOCAB))
    return Trainer(config, segments, Positions(samples, (4, 5), None), targets, no_progress), segments


def test_drawn_columns_stand_for_all_on_average(samples, monkeypatch):
    made, segments = make_trainer(*samples)
    batch = next(segments.steps(4, 0, 1))
    x = made._heads.hidden(batch.hidden.flatten(0, 1), made._embedded(batch.roots.flatten())).detach()
    # Heads that are wrong in their own way: what they like is not what the targets are about.
    x = x + 0.7 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    whole = torch.stack(made._gradients(x, batch, 0))
    monkeypatch.setattr(trainer, "_LIKELY_COLUMNS", 40)
    monkeypatch.setattr(trainer, "_DRAWN_COLUMNS", 20)
    drawn = torch.stack([torch.stack(made._gradients(x, batch, step)) for step in range(300)]).mean(dim=0)
    # What is left is the noise of 300 draws.
    assert torch.linalg.norm(drawn - whole) < 0.25 * torch.linalg.norm(whole)
    monkeypatch.setattr(trainer.math, "log", lambda _: 0.0)
    uncounted = torch.stack([torch.stack(made._gradients(x, batch, step)) for step in range(300)]).mean(dim=0)
    assert torch.linalg.norm(uncounted - whole) > 1.3 * torch.linalg.norm(drawn - whole)


def test_the_gradient_is_that_of_cross_entropy(samples):
    made, segments = make_trainer(*samples)
    batch = next(segments.steps(4, 0, 1))
    x = (
        made._heads.hidden(
            batch.hidden.flatten(0, 1),
            None if made._targets.embedding is None else made._embedded(batch.roots.flatten()),
        )
        .detach()
        .requires_grad_()
    )
    projection = made._targets.projection
    loss = torch.zeros(())
    for head in range(2):
        wanted = torch.softmax(batch.later[:, head : head + SEGMENT].flatten(0, 1) @ projection.T, dim=1)
        counts = batch.labels[:, head : head + SEGMENT].flatten() >= 0
        each = -(wanted * torch.log_softmax(x[head] @ projection.T, dim=1)).sum(dim=1)
        loss = loss + 0.8**head * (each * counts).mean()
    loss.backward()
    ours = torch.stack(made._gradients(x.detach(), batch, 0))
    # Ours are products of bfloat16 numbers, which have eight bits.
    assert torch.linalg.norm(ours - x.grad) < 0.03 * torch.linalg.norm(x.grad)


def test_segments_cover_every_position_that_has_something_to_foresee(samples):
    segments = Segments(samples[0], range(6), 2, 0)
    assert segments.positions == sum(length - 1 for length in (40, 7, 33, 2, 64, 50))
    per_epoch = len(segments)
    seen = [batch.labels[0, :SEGMENT] for batch in segments.steps(1, 0, per_epoch)]
    assert sum(int((labels >= 0).sum()) for labels in seen) == segments.positions
    first, again = (torch.cat([b.roots for b in segments.steps(1, 0, per_epoch)]) for _ in range(2))
    assert torch.equal(first, again)
    other = torch.cat([b.roots for b in segments.steps(1, per_epoch, 2 * per_epoch)])
    assert not torch.equal(first, other), "each epoch has its own order"


def test_heads_start_as_the_output_head(samples):
    made, _ = make_trainer(*samples)
    hidden = torch.randn(3, WIDTH)
    assert torch.equal(made._heads.hidden(hidden, torch.zeros(3, WIDTH))[1], hidden)


def test_the_scale_of_embeddings_ends_up_in_the_matrix(samples):
    made, segments = make_trainer(*samples, epochs=3.0)
    made._targets = made._targets._replace(scale=3.0)
    for step, batch in enumerate(segments.steps(4, 0, 3)):
        made._step(batch, 0.1, step)
    made._best = made._heads.copy()
    made._steps = 0  # nothing more to do: what there is becomes heads
    hidden, embedded = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
    wanted = made._heads.hidden(hidden, 3.0 * embedded)
    trained = made.run(None)
    with torch.no_grad():
        made._heads.first.copy_(torch.from_numpy(trained.tensors["first"]))
    got = made._heads.hidden(hidden, embedded)
    assert trained.tensors["first"][:, :, WIDTH:].any()
    assert torch.linalg.norm(got - wanted) < 0.01 * torch.linalg.norm(wanted)


def test_the_draft_vocabulary_is_what_is_frequent_and_what_ends_answers():
    tokens = np.array([5, 5, 5, 9, 9, 2], np.int32)
    assert draft_vocabulary(tokens, 4, 20, [17]).tolist() == [2, 5, 9, 17]
    assert draft_vocabulary(tokens, 6, 20, []).tolist() == [0, 1, 2, 3, 5, 9]
    assert draft_vocabulary(tokens, 20, 20, []) is None
    places = places_of(np.array([2, 5, 9], np.int32), 12)
    assert places.tolist() == [-1, -1, 0, -1, -1, 1, -1, -1, -1, 2, -1, -1]
