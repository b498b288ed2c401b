"""What optimc has to reach, and whether it did: `must` fails the run, `aim` is what we want of ourselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peer_quant.rows import ROWS


@dataclass(frozen=True)
class Verdict:
    """One target beside its figure."""

    target: str
    must: float | None
    aim: float | None
    figure: float | None
    unit: str = "nats"

    @property
    def outcome(self) -> str:
        if self.figure is None:
            return "not measured"
        if self.must is not None and self.figure > self.must:
            return "missed"
        return "reached" if self.aim is None or self.figure <= self.aim else "reached; aim missed"


def judge(data: Mapping[str, Any]) -> list[Verdict]:
    """Return a verdict for every target."""
    rows, served = data.get("rows", {}), data.get("served", {})
    verdicts = [
        Verdict("KL of `gptq`", 0.105, 0.09, _kl(rows, "gptq")),
        Verdict("KL of `awq` + `gptq`", 0.065, 0.05, _kl(rows, "awq-gptq")),
        Verdict("KL of `awq` + `auto_bits` + `gptq` at 4.8 bits", 0.035, 0.025, _kl(rows, "mixed")),
        Verdict("payload bits of that", 4.8, None, rows.get("mixed", {}).get("payload_bits"), "bits"),
        Verdict("GPTQ's wall time over GPTQModel's", 0.5, None, _ratio(rows, "gptq", "gm-gptq", "seconds"), "×"),
        Verdict("GPTQ's peak memory", 1.5e9 / 1e9, None, _gigabytes(rows, "gptq"), "GB"),
        *_beside_peers(rows),
        Verdict("KL that int8 KV adds to float32 weights", 0.002, None, _added(served, "kv-int8", "fp32")),
        Verdict("KL that int8 KV adds to GPTQ weights", 0.002, None, _added(served, "gptq-kv-int8", "gptq")),
    ]
    large = data.get("large", {})
    for method in ("rtn", "gptq"):
        four, eight = large.get(f"{method}-4"), large.get(f"{method}-8")
        figure = eight["peak_bytes"] / four["peak_bytes"] if four and eight else None
        verdicts.append(Verdict(f"7B shape, {method}: peak memory of 8 layers over 4", 1.1, None, figure, "×"))
    return verdicts


def _beside_peers(rows: Mapping[str, Any]) -> Iterator[Verdict]:
    """Yield, for every setting and text both have, our KL over the better peer's."""
    for ours in ROWS:
        peers = [
            row
            for row in ROWS
            if row.tool != "optimc" and (row.method, row.setting, row.model) == (ours.method, ours.setting, ours.model)
        ]
        if ours.tool != "optimc" or not peers:
            continue
        for text in ("docs", "own"):
            theirs = [kl for row in peers if (kl := _kl(rows, row.id, text)) is not None]
            own = _kl(rows, ours.id, text)
            if text == "own" and not ours.own_text:
                continue
            figure = own / min(theirs) if own is not None and theirs else None
            where = f"{ours.method}, {ours.setting}, {ours.model}, {text} text"
            yield Verdict(f"KL over the better peer's: {where}", 1.0, None, figure, "×")


def _kl(rows: Mapping[str, Any], name: str, text: str = "docs") -> float | None:
    found = rows.get(name, {}).get("texts", {}).get(text)
    return None if found is None else float(found["kl"])


def _ratio(rows: Mapping[str, Any], ours: str, theirs: str, key: str) -> float | None:
    pair = [rows.get(name, {}).get(key) for name in (ours, theirs)]
    return None if None in pair else pair[0] / pair[1]


def _gigabytes(rows: Mapping[str, Any], name: str) -> float | None:
    peak = rows.get(name, {}).get("peak_bytes")
    return None if peak is None else peak / 1e9


def _added(served: Mapping[str, Any], name: str, base: str, length: str = "512") -> float | None:
    pair = [served.get(each, {}).get("lengths", {}).get(length) for each in (name, base)]
    return None if None in pair else pair[0]["kl"] - pair[1]["kl"]
