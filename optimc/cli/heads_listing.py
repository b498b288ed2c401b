"""What a plan says of its Medusa heads, as text: what they are, how often they are right, the tree of their guesses.

`optimc inspect PLAN` prints all of it below the passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from optimc.plan import DraftTreeInfo, HeadAccuracy, HeadsInfo, HeadsReport

_RANKS = (1, 2, 3, 5, 10)
"""First so many guesses whose accuracy is listed."""
_NODES = 12
"""Nodes of the tree that are listed before they are only counted."""


def heads_lines(info: HeadsInfo, report: HeadsReport | None) -> Iterator[str]:
    """Yield the description of a plan's heads; `report` is that of the pass that made them, if the plan has it."""
    yield describe_heads(info)
    if report is not None:
        yield from _origin(report)
    before = [entry for entry in report.accuracies if not entry.quantized] if report is not None else []
    yield from _accuracies(info.accuracies, before)
    yield from _tree(info.tree)


def describe_heads(info: HeadsInfo) -> str:
    """Say in one line what the heads are."""
    blocks = "1 block" if info.num_blocks == 1 else f"{info.num_blocks} blocks"
    reads = "the hidden state and the last token" if info.conditioned else "the hidden state"
    projection = "the output head" if info.projection == "shared" else "an output head of its own each"
    width = "float" if info.bits is None else f"{info.bits}-bit"
    return (
        f"{info.num_heads} heads of {blocks}, {width}, that read {reads}; {projection} over {info.draft_vocab_size:,} "
        "tokens"
    )


def _origin(report: HeadsReport) -> Iterator[str]:
    if report.source == "imported":
        yield "taken over as they were"
    else:
        trained = ", ".join(f"{count:,} of {kind}" for kind, count in sorted(report.tokens.items()))
        yield f"trained on {trained} tokens, {report.epochs:.1f} epochs; {report.stopped_because}"
    if report.resumed_at_step is not None:
        yield f"went on at step {report.resumed_at_step}, where an earlier build had come to"
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report.seconds.items())
    yield f"seconds: {spent}"
    if report.history:
        looks = report.history[:: max(1, len(report.history) // 6)]
        listed = ", ".join(f"{share:.3f} after {seen:,}" for seen, share in looks)
        yield f"first head right on held-out text: {listed} tokens"


def _accuracies(after: Sequence[HeadAccuracy], before: Sequence[HeadAccuracy]) -> Iterator[str]:
    if not after:
        yield "never measured"
        return
    unrounded = {(entry.head, entry.kind): entry.top[0] for entry in before if entry.top}
    yield "right among the first guesses, where the guesses before were right:"
    ranks = [rank for rank in _RANKS if rank <= max(len(entry.top) for entry in after)]
    yield _row("head", "text", *(f"top {rank}" for rank in ranks), "unrounded", "positions")
    for entry in after:
        shares = [f"{entry.top[rank - 1]:.3f}" if rank <= len(entry.top) else "" for rank in ranks]
        exact = unrounded.get((entry.head, entry.kind))
        yield _row(
            str(entry.head + 1), entry.kind, *shares, "" if exact is None else f"{exact:.3f}", f"{entry.tokens:,}"
        )


def _tree(tree: DraftTreeInfo) -> Iterator[str]:
    promised = "" if tree.expected_tokens is None else f", {tree.expected_tokens:.2f} tokens a step by these figures"
    yield f"tree ({tree.source}) of {len(tree.nodes)} nodes{promised}:"
    shown = " ".join("-".join(str(rank + 1) for rank in node) for node in tree.nodes[:_NODES])
    more = f" and {len(tree.nodes) - _NODES} more (--json)" if len(tree.nodes) > _NODES else ""
    yield f"  {shown}{more}"
    if tree.costs:
        listed = ", ".join(f"{rows}: {1e3 * seconds:.2f}" for rows, seconds in tree.costs)
        yield f"  ms of a step by its rows, on {tree.machine}: {listed}"


def _row(head: str, kind: str, *cells: str) -> str:
    return f"  {head:<4} {kind:<8}" + "".join(f"{cell:>10}" for cell in cells).rstrip()
