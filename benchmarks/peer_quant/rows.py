"""What is quantized, by whom and how: one entry per line of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Tool = Literal["optimc", "GPTQModel", "llm-compressor"]

RTN: Mapping[str, Any] = {"bits": 4, "group_size": 64, "symmetric": False}
RAGGED: Mapping[str, Any] = {"group_size": 128, "ragged": "ragged"}
"""576 columns are four and a half groups of 128; the peers want groups that divide."""


@dataclass(frozen=True)
class Row:
    """One folder: made, timed, judged."""

    id: str
    section: Literal["ours", "peers", "grid"]
    tool: Tool
    method: str
    """What stands in the table; rows of one setting and one model compare by it."""
    setting: str
    model: Literal["smollm2", "dithered"] = "smollm2"
    recipe: str | None = None
    """The shipped recipe whose weight passes are run; None: `passes` alone."""
    passes: tuple[Mapping[str, Any], ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Options set in every pass of the recipe that rounds or scales."""
    format: str = "gptq"
    own_text: bool = False
    """Whether text the model wrote is judged, too."""


G64, G128, W8 = "4 bits asymmetric, group 64", "4 bits asymmetric, group 128 ragged", "8 bits per row"

ROWS = (
    Row("rtn", "ours", "optimc", "RTN", G64, passes=({"rtn": RTN},), own_text=True),
    Row("gptq", "ours", "optimc", "GPTQ", G64, recipe="smollm2-int4-gptq", own_text=True),
    Row("awq", "ours", "optimc", "AWQ", G64, recipe="smollm2-int4-awq", own_text=True),
    Row("awq-gptq", "ours", "optimc", "AWQ + GPTQ", G64, recipe="smollm2-int4-awq-gptq", own_text=True),
    Row(
        "mixed",
        "ours",
        "optimc",
        "AWQ + auto_bits + GPTQ",
        "4.8 bits of payload, group 64",
        recipe="smollm2-int4-mixed",
        own_text=True,
    ),
    Row("w8a8", "ours", "optimc", "SmoothQuant, weights alone", W8, recipe="smollm2-w8a8", format="compressed-tensors"),
    Row("lc-gptq", "peers", "llm-compressor", "GPTQ", G64, own_text=True),
    Row("lc-awq", "peers", "llm-compressor", "AWQ", G64, own_text=True),
    Row("gm-gptq", "peers", "GPTQModel", "GPTQ", G64, own_text=True),
    Row("rtn-128", "grid", "optimc", "RTN", G128, passes=({"rtn": {**RTN, **RAGGED}},)),
    Row("gptq-128", "grid", "optimc", "GPTQ", G128, recipe="smollm2-int4-gptq", changes=RAGGED),
    Row("awq-gptq-128", "grid", "optimc", "AWQ + GPTQ", G128, recipe="smollm2-int4-awq-gptq", changes=RAGGED),
    Row("rtn-dithered", "grid", "optimc", "RTN", G64, "dithered", passes=({"rtn": RTN},)),
    Row("gptq-dithered", "grid", "optimc", "GPTQ", G64, "dithered", recipe="smollm2-int4-gptq"),
    Row("awq-gptq-dithered", "grid", "optimc", "AWQ + GPTQ", G64, "dithered", recipe="smollm2-int4-awq-gptq"),
    Row("lc-gptq-dithered", "grid", "llm-compressor", "GPTQ", G64, "dithered"),
    Row("gm-gptq-dithered", "grid", "GPTQModel", "GPTQ", G64, "dithered"),
)
