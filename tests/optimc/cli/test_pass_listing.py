"""What passes say layer by layer, and how a KV cache of several formats reads."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from optimc.cli.app import app
from optimc.cli.kv_listing import describe_kv
from optimc.cli.pass_listing import WORST, pass_lines
from optimc.cli.pass_summary import print_passes
from optimc.plan import FrontierPoint, KvLayer, KvLayout, LayerReport, PassQuality, PassReport

QUALITY = PassQuality(perplexity_before=15.0912, perplexity_after=15.5, kl_before=0, kl_after=0.09876, tokens=1022)


def layer(index, **facts):
    given = {"bits": 4, "group": 64, "error": index / 100, "bytes_before": 4096, "bytes_after": 1024, **facts}
    return LayerReport(layer=f"model.layers.{index}.mlp.up_proj", **given)


def report(**facts):
    return PassReport(name="gptq", version=1, config={}, seconds=1, peak_bytes=1, **facts)


def kv(*layers, dtype="int8"):
    return KvLayout(block_size=16, dtype=dtype, layers=layers)


def kv_layer(**facts):
    return KvLayer(num_kv_heads=2, head_dim=16, window=0, **facts)


CHANNEL = {"keys": "channel", "provenance": "calibrated", "calibration_tokens": 32768, "key_scales": "kv/0/key_scales"}


def test_a_pass_without_layers_says_nothing():
    assert list(pass_lines(report())) == []


def test_the_worst_layers_come_first_and_the_rest_are_counted():
    lines = list(pass_lines(report(layers=tuple(layer(index) for index in range(20)))))
    assert lines[0].split() == ["layer", "bits", "group", "error", "damping", "seconds", "size"]
    listed = lines[1 : 1 + WORST]
    assert [line.split()[0] for line in listed] == [f"model.layers.{index}.mlp.up_proj" for index in range(19, 11, -1)]
    assert listed[0].split()[1:] == ["4", "64", "1.90e-01", "0.0", "4.0", "KiB", "→", "1.0", "KiB"]
    assert lines[-1] == "12 more (--json shows them); 20 in all, 80.0 KiB → 20.0 KiB"
    assert all(len(line) <= 100 for line in lines)


def test_what_fell_back_is_listed_whatever_its_error():
    layers = [layer(index) for index in range(WORST + 1, 20)]
    fallen = layer(0, fallback="the moment is not finite", damping=0.05, note="2 windows")
    lines = list(pass_lines(report(layers=(fallen, *layers))))
    place = next(number for number, line in enumerate(lines) if "layers.0." in line)
    assert "0.05" in lines[place]
    assert lines[place + 1 : place + 3] == ["    rounded to nearest: the moment is not finite", "    2 windows"]


def test_layers_left_dense_and_errors_nobody_measured():
    lines = list(pass_lines(report(layers=(layer(0, bits=None, group=None, error=None), layer(1)))))
    assert [line.split()[1] for line in lines[1:3]] == ["4", "dense"]
    assert lines[-1] == "2 in all, 8.0 KiB → 2.0 KiB"


def test_quality_calibration_and_resumption_are_one_line_each():
    lines = list(pass_lines(report(quality=QUALITY, calibration_tokens=32768, resumed_at=7)))
    assert lines == [
        "perplexity 15.091 → 15.500, KL 0.0000 → 0.0988 nats a token, over 1,022 tokens",
        "calibrated on 32,768 tokens",
        "went on at layer 7, where an earlier build had come to",
    ]


def test_the_frontier_marks_what_was_chosen():
    points = tuple(
        FrontierPoint(bits=b, nbytes=n, kl=k, chosen=b == 4.8) for b, n, k in ((4, 1 << 20, 0.1), (4.8, 2 << 20, 0.03))
    )
    lines = list(pass_lines(report(frontier=points)))
    assert lines[1].split() == ["bits", "size", "KL"]
    assert [line.split() for line in lines[2:]] == [
        ["4.00", "1.0", "MiB", "0.1000"],
        ["4.80", "2.0", "MiB", "0.0300", "chosen"],
    ]


def test_a_build_prints_quality_and_frontier_below_the_passes():
    printed = StringIO()
    points = (FrontierPoint(bits=4, nbytes=1 << 20, kl=0.1, chosen=True),)
    print_passes(Console(file=printed, width=120), "made", [report(quality=QUALITY), report(frontier=points)])
    lines = printed.getvalue().splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("gptq: perplexity 15.091"))
    assert lines[place + 1].startswith("choices that no other beats")
    assert lines[-1].split() == ["4.00", "1.0", "MiB", "0.1000", "chosen"]


def test_inspect_layers_shows_every_pass_that_has_some(plan):
    passes = (report(layers=(layer(3),), quality=QUALITY), report(layers=()), report(layers=(layer(5),)))
    path = str(plan("a.plan", passes=passes))
    text = CliRunner().invoke(app, ["inspect", path, "--layers"]).output
    assert text.count("gptq\n") == 2
    assert "model.layers.3.mlp.up_proj" in text
    assert "model.layers.5.mlp.up_proj" in text
    shown = json.loads(CliRunner().invoke(app, ["inspect", path, "--layers", "--json"]).output)
    assert [[entry["layer"] for entry in each["layers"]] for each in shown] == [
        ["model.layers.3.mlp.up_proj"],
        ["model.layers.5.mlp.up_proj"],
    ]
    assert shown[0]["quality"]["kl_after"] == QUALITY.kl_after


def test_inspect_layers_of_a_plan_without_any(plan):
    output = CliRunner().invoke(app, ["inspect", str(plan("a.plan")), "--layers"]).output
    assert output == "no pass of this plan says anything about single layers\n"


def test_inspect_shows_quality_and_the_cache(plan):
    layout = kv(kv_layer(**CHANNEL), kv_layer(dtype="bfloat16"))
    path = str(plan("a.plan", kv=layout, passes=(report(quality=QUALITY),)))
    text = " ".join(CliRunner().invoke(app, ["inspect", path], env={"COLUMNS": "250"}).output.split())
    assert "int8 in 1 layer, bfloat16 in 1 layer; keys per channel in 1 layer, calibrated on 32,768 tokens" in text
    assert "KL 0.0000 → 0.0988" in text


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (kv(kv_layer(), kv_layer(), dtype="float32"), "float32"),
        (kv(kv_layer(dtype="int4"), kv_layer(), kv_layer()), "int8 in 2 layers, int4 in 1 layer"),
        (
            kv(kv_layer(**CHANNEL), kv_layer(**CHANNEL)),
            "int8; keys per channel in all layers, calibrated on 32,768 tokens",
        ),
        (
            kv(kv_layer(**{**CHANNEL, "provenance": "default", "calibration_tokens": 0}), kv_layer()),
            "int8; keys per channel in 1 layer, uncalibrated",
        ),
    ],
)
def test_a_cache_in_words(layout, words):
    assert describe_kv(layout) == words


def test_two_plans_differ_in_the_layers_that_differ(plan):
    left = plan("left.plan", kv=kv(kv_layer(), kv_layer(), dtype="int8"))
    right = plan("right.plan", kv=kv(kv_layer(), kv_layer(dtype="int4"), dtype="int8"))
    output = CliRunner().invoke(app, ["inspect", str(left), str(right)]).output
    assert output.splitlines() == ["settings", "  kv.layers.1.dtype: none → int4"]
