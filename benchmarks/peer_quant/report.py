"""The result as Markdown: verdicts first, then every row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from peer_quant.rows import ROWS
from peer_quant.targets import judge

QUOTED = (
    ("llama.cpp Q4_0", "4.5", "0.264"),
    ("llama.cpp Q4_K_M", "5.5", "0.048"),
)
"""Measured before with llama.cpp's own converter on the same text; the blocks of its formats have 32 weights."""


def report(data: Mapping[str, Any]) -> str:
    """Return the whole report."""
    lines = ["# Weight quantization of SmolLM2-135M beside GPTQModel and llm-compressor", "", data["machine"], ""]
    lines += [*_verdicts(data), "", *_rows(data)]
    for title, key, table in (
        ("Served by the engine", "served", _served),
        ("A 7B shape, some of its layers, random weights in shards", "large", _large),
    ):
        if data.get(key):
            lines += ["", f"## {title}", "", *table(data[key])]
    lines += ["", *_frontier(data), "", *_notes(data)]
    return "\n".join(lines).rstrip() + "\n"


def _verdicts(data: Mapping[str, Any]) -> Iterator[str]:
    yield "| target | must | aim | measured | |"
    yield "| --- | ---: | ---: | ---: | --- |"
    for verdict in judge(data):
        cells = [_figure(value) for value in (verdict.must, verdict.aim, verdict.figure)]
        yield f"| {verdict.target}, {verdict.unit} | " + " | ".join(cells) + f" | {verdict.outcome} |"


def _rows(data: Mapping[str, Any]) -> Iterator[str]:
    yield "## Weights"
    yield ""
    yield "| tool | method | setting | weights | KL docs | KL own text | perplexity | top-1 | bits, stored | s | GB |"
    yield "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in ROWS:
        found = data["rows"].get(row.id)
        if found is None:
            continue
        docs, own = found["texts"].get("docs"), found["texts"].get("own")
        bits = "–" if found["payload_bits"] is None else f"{found['payload_bits']:.2f} / {found['stored_bits']:.2f}"
        cells = [
            f"{docs['kl']:.4f}",
            "–" if own is None else f"{own['kl']:.4f}",
            f"{docs['perplexity']:.2f}",
            f"{docs['top1']:.1%}",
            bits,
            f"{found['seconds']:.0f}",
            f"{found['peak_bytes'] / 1e9:.2f}",
        ]
        yield f"| {row.tool} | {row.method} | {row.setting} | {row.model} | " + " | ".join(cells) + " |"
    for name, bits, kl in QUOTED:
        yield f"| {name} | quoted, not of this run | blocks of 32 | smollm2 | {kl} | – | – | – | – / {bits} | – | – |"
    missing = [row.id for row in ROWS if row.id not in data["rows"]]
    if missing:
        yield ""
        yield f"Not measured: {', '.join(missing)}."


def _served(served: Mapping[str, Any]) -> Iterator[str]:
    yield "| plan | window | KL | perplexity | top-1 | tokens |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for name, facts in served.items():
        for length, figures in facts["lengths"].items():
            cells = [f"{figures['kl']:.5f}", f"{figures['perplexity']:.3f}", f"{figures['top1']:.1%}"]
            yield f"| {name} | {length} | " + " | ".join(cells) + f" | {figures['tokens']:,} |"


def _large(large: Mapping[str, Any]) -> Iterator[str]:
    yield "| build | checkpoint GB | peak GB of the process | in the pass | s |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, facts in large.items():
        sizes = [facts[key] / 1e9 for key in ("checkpoint_bytes", "peak_bytes", "pass_peak_bytes")]
        yield f"| {name} layers | " + " | ".join(f"{size:.2f}" for size in sizes) + f" | {facts['seconds']:.0f} |"


def _frontier(data: Mapping[str, Any]) -> Iterator[str]:
    passes = data["rows"].get("mixed", {}).get("passes", ())
    points = [point for report in passes for point in report["frontier"]]
    if not points:
        return
    yield "## The frontier that auto_bits chose from"
    yield ""
    yield "| payload bits per weight | MB stored | KL predicted | |"
    yield "| ---: | ---: | ---: | --- |"
    for point in points:
        chosen = "chosen" if point["chosen"] else ""
        yield f"| {point['bits']:.2f} | {point['nbytes'] / 1e6:.1f} | {point['kl']:.4f} | {chosen} |"


def _notes(data: Mapping[str, Any]) -> Iterator[str]:
    facts = data["facts"]
    yield (
        f"Calibration: {facts['samples']} windows of {facts['length']} tokens, SHA-256 {facts['calibration'][:16]}…; "
        f"evaluation: {facts['windows']} windows of {facts['length']} of other topics, as many that the model wrote."
    )
    versions: dict[str, str] = {}
    for row in data["rows"].values():
        versions |= row.get("versions", {})
    if versions:
        yield ""
        yield "Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) + "."
    yield ""
    yield (
        "Seconds and gigabytes are those of the whole process, from starting Python to the folder on disk, ours with "
        "reading it back. KL by one judge for all folders: transformers in float32 with the weights as stored."
    )


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
