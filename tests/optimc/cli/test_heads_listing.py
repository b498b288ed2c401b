"""Heads in words: what `optimc inspect` says of them."""

from __future__ import annotations

from optimc.cli.heads_listing import heads_lines
from optimc.plan import DraftTreeInfo, HeadAccuracy, HeadInfo, HeadsInfo, HeadsReport


def accuracy(head, top, *, quantized, kind="chat"):
    return HeadAccuracy(head=head, kind=kind, top=top, tokens=1234, quantized=quantized)


AFTER = (accuracy(0, (0.5, 0.6, 0.7), quantized=True), accuracy(1, (0.3, 0.4, 0.5), quantized=True))
BEFORE = (accuracy(0, (0.55, 0.65, 0.75), quantized=False), accuracy(1, (0.35, 0.45, 0.55), quantized=False))
INFO = HeadsInfo(
    num_heads=2,
    hidden_size=576,
    num_blocks=1,
    conditioned=True,
    projection="shared",
    draft_vocab_size=6144,
    draft_vocab="heads/draft_vocab",
    bits=8,
    base_hash="",
    heads=(HeadInfo(confidence=((-1.0, 0.3), (0.0, 0.9))),) * 2,
    accuracies=AFTER,
    tree=DraftTreeInfo(
        nodes=((0,), (0, 0), (1,)),
        source="auto",
        expected_tokens=1.85,
        costs=((1, 1e-3), (2, 1.25e-3)),
        machine="some machine, 2 cores",
    ),
)
REPORT = HeadsReport(
    source="trained",
    tokens={"chat": 380_000, "prose": 95_000},
    heldout_tokens={"chat": 20_000, "prose": 5_000},
    seconds={"sample": 200.4, "train": 900.0, "measure": 12.0},
    epochs=7.5,
    stopped_because="18 minutes were over",
    resumed_at_step=420,
    history=((0, 0.1), (1_000_000, 0.5)),
    accuracies=(*BEFORE, *AFTER),
)


def test_trained_heads_are_described_with_their_accuracies_before_and_after_rounding():
    lines = list(heads_lines(INFO, REPORT))
    assert lines[0] == (
        "2 heads of 1 block, 8-bit, that read the hidden state and the last token; the output head over 6,144 tokens"
    )
    assert lines[1] == "trained on 380,000 of chat, 95,000 of prose tokens, 7.5 epochs; 18 minutes were over"
    assert "went on at step 420, where an earlier build had come to" in lines
    assert "seconds: sample 200 s, train 900 s, measure 12 s" in lines
    (first,) = (line for line in lines if line.startswith("  1 ") and "chat" in line)
    assert first.split() == ["1", "chat", "0.500", "0.600", "0.700", "0.550", "1,234"]
    assert "tree (auto) of 3 nodes, 1.85 tokens a step by these figures:" in lines
    assert "  1 1-1 2" in lines
    assert lines[-1] == "  ms of a step by its rows, on some machine, 2 cores: 1: 1.00, 2: 1.25"
    assert max(map(len, lines)) <= 120


def test_imported_heads_that_nobody_measured_say_so():
    info = INFO.model_copy(
        update={
            "accuracies": (),
            "bits": None,
            "conditioned": False,
            "projection": "own",
            "tree": DraftTreeInfo(nodes=((0,),), source="chain", expected_tokens=None, costs=(), machine=""),
        }
    )
    report = REPORT.model_copy(
        update={"source": "imported", "accuracies": (), "history": (), "resumed_at_step": None, "tokens": {}}
    )
    lines = list(heads_lines(info, report))
    assert lines[0].startswith("2 heads of 1 block, float, that read the hidden state; an output head of its own each")
    assert lines[1] == "taken over as they were"
    assert "never measured" in lines
    assert lines[-2:] == ["tree (chain) of 1 nodes:", "  1"]


def test_a_long_tree_is_listed_in_part():
    nodes = tuple((rank,) for rank in range(10)) + tuple((0, rank) for rank in range(10))
    tree = INFO.tree.model_copy(update={"nodes": nodes})
    lines = list(heads_lines(INFO.model_copy(update={"tree": tree}), None))
    assert "  1 2 3 4 5 6 7 8 9 10 1-1 1-2 and 8 more (--json)" in lines
