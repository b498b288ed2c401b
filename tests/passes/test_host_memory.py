"""A limit on memory is obeyed, or refused before the first pass with the number that is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from optimc.errors import ConfigError
from optimc_passes.artifact import Artifact
from optimc_passes.calibrate import Calibration
from optimc_passes.host_memory import check_host_memory
from optimc_passes.memory import resident_bytes
from optimc_passes.pipeline_options import PipelineOptions
from optimc_passes.quantize.gptq import Gptq, GptqConfig
from optimc_passes.quantize.rtn import Rtn, RtnConfig
from optimc_passes.walk.host_bytes import walk_host_bytes
from optimc_passes.weight_stage import run_weight_stage
from optimc_passes.weights import Dense, WeightStore

ROWS = tuple(np.random.default_rng(3).integers(0, 96, 40).astype(np.int32) for _ in range(3))


def start(family: Any) -> Artifact:
    return Artifact.start(family.checkpoint, Calibration(ROWS, "c" * 64, 120, "random"))


def test_what_is_needed_is_told_before_a_weight_is_read(make_family: Callable[..., Any]):
    family = make_family("llama")

    def read() -> Any:
        raise AssertionError("data was read")

    lazy = WeightStore({n: Dense(w.shape, w.dtype, read) for n, w in family.checkpoint.weights.items()})
    passes = [Rtn(RtnConfig(group_size=16, only=("lm_head",), ignore=())), Gptq(GptqConfig(group_size=16))]
    options = PipelineOptions(verify="shapes", max_host_bytes=1 << 20)
    with pytest.raises(ConfigError) as caught:
        run_weight_stage(passes, start(family).evolve(weights=lazy), options)
    messages = [fault.message for fault in caught.value.faults]
    assert [message.split()[0] for message in messages] == ["rtn", "gptq"]
    assert all("0.00 GiB are allowed" in message for message in messages)
    needed = float(messages[1].split("needs ")[1].split(" GiB")[0])
    assert needed == pytest.approx(resident_bytes() / (1 << 30), abs=0.2)


def test_checking_by_numbers_counts_and_names_the_way_out(make_family: Callable[..., Any]):
    family = make_family("llama", vocab_size=200_000, hidden_size=512, num_attention_heads=4, head_dim=16)
    room = resident_bytes() + (250 << 20)
    with pytest.raises(ConfigError, match="set `verify: shapes`, or allow that much"):
        check_host_memory([], start(family), PipelineOptions(verify="numeric", max_host_bytes=room))
    check_host_memory([], start(family), PipelineOptions(verify="shapes", max_host_bytes=room))


def test_enough_is_enough(make_family: Callable[..., Any]):
    family = make_family("llama")
    options = PipelineOptions(max_host_bytes=resident_bytes() + (1 << 30))
    check_host_memory([Gptq(GptqConfig(group_size=16))], start(family), options)


def test_a_walk_needs_as_much_for_more_layers(make_family: Callable[..., Any]):
    two, four = (walk_host_bytes(start(make_family("llama", num_hidden_layers=layers))) for layers in (2, 4))
    assert two == four
    # q, k, v, o, gate, up, down and two norms, in float32, as they were and as they become.
    assert two.layer == 2 * 4 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 96 * 64 + 128)
