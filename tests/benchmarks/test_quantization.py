"""The parts of benchmarks/quantization.py that decide what a figure is and whether a target was reached."""

import sys

import numpy as np
import pytest
from peer_quant.judge import score
from peer_quant.make_row import _last_json
from peer_quant.materials import dither
from peer_quant.process import CommandError, run_measured
from peer_quant.report import report
from peer_quant.rows import ROWS
from peer_quant.served import _figures
from peer_quant.targets import judge

from optimc.measure.divergence import WindowScore, score_window


class Fixed:
    def __init__(self, logits):
        self._logits = logits

    def logits(self, _tokens):
        return self._logits


def test_the_judge_scores_as_optimc_eval_does(tmp_path):
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 50, 300).astype(np.int32)
    own, other = (draw.standard_normal((300, 50)).astype(np.float32) for _ in range(2))
    np.save(tmp_path / "0.npy", other)
    figures = score(Fixed(own), tokens[None], [tmp_path / "0.npy"])
    expected: WindowScore = score_window(tokens, own, other)
    assert figures["predictions"] == expected.predictions == 299
    assert figures["kl"] == pytest.approx(expected.kl / 299, rel=1e-9)
    assert figures["perplexity"] == pytest.approx(expected.perplexity, rel=1e-9)
    assert figures["original_perplexity"] == pytest.approx(expected.reference_perplexity, rel=1e-9)
    assert figures["top1"] == expected.top1_matches / 299


def test_dithering_moves_by_half_a_step_at_most_and_is_reproducible():
    draw = np.random.default_rng(1)
    step = draw.uniform(0.01, 0.1, (8, 3, 1)).astype(np.float32)
    codes = draw.integers(0, 16, (8, 3, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    weight = ((codes - 7) * step).astype(np.float32).reshape(8, 96)
    moved = dither(weight, np.random.default_rng(0))
    steps = np.abs(moved - weight).reshape(8, 3, 32) / step
    assert steps.max() <= 0.5 + 1e-3
    assert steps.max() > 0.45
    assert np.array_equal(moved, dither(weight, np.random.default_rng(0)))


def test_commands_are_timed_and_their_failures_quoted(tmp_path):
    run = run_measured([sys.executable, "-c", "x = bytearray(60_000_000); print(1)"], tmp_path / "good.log")
    assert run.peak_bytes > 60_000_000
    assert run.seconds > 0
    with pytest.raises(CommandError, match="no such luck"):
        run_measured([sys.executable, "-c", "raise SystemExit('no such luck')"], tmp_path / "bad.log")


def test_the_peak_of_a_command_is_not_that_of_whoever_starts_it(tmp_path):
    held = np.ones(60_000_000, np.float32)
    run = run_measured([sys.executable, "-S", "-c", "pass"], tmp_path / "small.log")
    assert run.peak_bytes < 100_000_000 < held.nbytes


@pytest.mark.parametrize("text", ['noise\n{"a": 1}\n', 'noise\n{\n  "a": 1\n}\n'])
def test_the_answer_is_what_a_log_ends_with(tmp_path, text):
    (tmp_path / "log").write_text(text)
    assert _last_json(tmp_path / "log") == {"a": 1}


def made(kl, **changes):
    text = {"kl": kl, "perplexity": 15.0, "top1": 0.9}
    facts = {"texts": {"docs": text, "own": text}, "seconds": 50.0, "peak_bytes": 1e9, "payload_bits": 4.0}
    return facts | {"stored_bits": 4.3, "passes": []} | changes


def data(**rows):
    facts = {"samples": 64, "windows": 16, "length": 512, "calibration": "0" * 64}
    return {"machine": "here", "facts": facts, "rows": rows, "served": {}, "large": {}}


def verdicts(found):
    return {verdict.target: verdict.outcome for verdict in judge(found)}


def test_targets_are_reached_missed_or_not_measured():
    assert set(verdicts(data()).values()) == {"not measured"}
    found = verdicts(data(gptq=made(0.1)))
    assert found["KL of `gptq`"] == "reached; aim missed"
    assert found["GPTQ's peak memory"] == "reached"
    assert verdicts(data(gptq=made(0.2)))["KL of `gptq`"] == "missed"
    assert verdicts(data(gptq=made(0.08)))["KL of `gptq`"] == "reached"


def test_the_better_peer_counts_at_every_setting_both_have():
    rows = {"gptq": made(0.1), "lc-gptq": made(0.12), "gm-gptq": made(0.09, seconds=200.0)}
    found = verdicts(data(**rows))
    assert found["KL over the better peer's: GPTQ, 4 bits asymmetric, group 64, smollm2, docs text"] == "missed"
    assert found["GPTQ's wall time over GPTQModel's"] == "reached"
    assert not [target for target in found if "group 128" in target]


def test_the_served_and_the_large_have_tables_of_their_own():
    found = data(gptq=made(0.1))
    figures = {"kl": 0.0011, "perplexity": 15.1, "top1": 0.99, "tokens": 8176}
    found["served"] = {"kv-int8": {"lengths": {"512": figures}}, "fp32": {"lengths": {"512": figures | {"kl": 0.0001}}}}
    sizes = {"checkpoint_bytes": 2e9, "peak_bytes": 3e9, "pass_peak_bytes": 1e9, "seconds": 60.0}
    found["large"] = {"rtn-4": sizes, "rtn-8": sizes | {"peak_bytes": 3.6e9}}
    text = report(found)
    assert "| kv-int8 | 512 | 0.00110 | 15.100 | 99.0% | 8,176 |" in text
    assert "| rtn-8 layers | 2.00 | 3.60 | 1.00 | 60 |" in text
    outcomes = verdicts(found)
    assert outcomes["KL that int8 KV adds to float32 weights"] == "reached"
    assert outcomes["7B shape, rtn: peak memory of 8 layers over 4"] == "missed"


def test_the_figures_of_an_evaluation_are_found_behind_its_progress():
    text = 'eval: done\n{\n  "perplexity": 15.1,\n  "kl_mean": 0.5,\n  "top1_agreement": 0.9,\n  "tokens": 3\n}\n'
    assert _figures(text) == {"kl": 0.5, "perplexity": 15.1, "top1": 0.9, "tokens": 3}


def test_the_report_names_every_row_and_what_was_not_measured():
    text = report(data(gptq=made(0.1)))
    assert "| optimc | GPTQ | 4 bits asymmetric, group 64 | smollm2 | 0.1000 | 0.1000 | 15.00 | 90.0% |" in text
    for row in ROWS:
        assert row.id in text or row.id == "gptq"
    assert "quoted, not of this run" in text
