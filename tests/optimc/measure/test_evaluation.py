import math

import numpy as np
import pytest
from rich.console import Console

from optimc.errors import CheckpointError, MeasureError
from optimc.measure import evaluation as module
from optimc.measure.evaluation import EvalResult, eval_plan, evaluate
from optimc.plan import Plan, PlanTensor, write_plan

WINDOWS = np.array([[0, 1, 2, 1], [2, 2, 0, 1]], np.int32)


def table_logits(table):
    """A bigram model: the row of the current token."""
    rows = np.log(np.asarray(table)).astype(np.float32)
    return lambda tokens: rows[np.asarray(tokens)]


PLAN = [[0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.3, 0.4, 0.3]]
ORIGINAL = [[0.4, 0.5, 0.1], [0.2, 0.2, 0.6], [0.3, 0.4, 0.3]]


class Bigram:
    def __init__(self, table):
        self.logits = table_logits(table)


@pytest.fixture
def engine(scripted_engine):
    engine = scripted_engine(lambda *_: [], vocab_size=3)
    engine.scores = table_logits(PLAN)
    return engine


def test_figures_by_hand(engine):
    result = evaluate(engine, WINDOWS, Bigram(ORIGINAL))
    # Transitions: 0>1 1>2 2>1 | 2>2 2>0 0>1
    nll = -math.log(0.25 * 0.6 * 0.4 * 0.3 * 0.3 * 0.25) / 6
    reference_nll = -math.log(0.5 * 0.6 * 0.4 * 0.3 * 0.3 * 0.5) / 6
    kl_after_0 = 0.4 * math.log(0.4 / 0.5) + 0.5 * math.log(0.5 / 0.25) + 0.1 * math.log(0.1 / 0.25)
    assert result.perplexity == pytest.approx(math.exp(nll), rel=1e-6)
    assert result.reference_perplexity == pytest.approx(math.exp(reference_nll), rel=1e-6)
    assert result.kl_mean == pytest.approx(2 * kl_after_0 / 6, rel=1e-5)
    assert result.top1_agreement == pytest.approx(4 / 6)
    assert result.tokens == 6


def test_json_has_exactly_the_documented_keys(engine):
    assert list(evaluate(engine, WINDOWS, Bigram(ORIGINAL)).to_json()) == [
        "perplexity",
        "reference_perplexity",
        "kl_mean",
        "top1_agreement",
        "tokens",
        "kl_windows",
    ]


def test_kl_of_each_window_by_hand(engine):
    result = evaluate(engine, WINDOWS, Bigram(ORIGINAL))
    # Only the prediction after token 0 differs; the first window has it at its start, the second in its middle.
    kl_after_0 = 0.4 * math.log(0.4 / 0.5) + 0.5 * math.log(0.5 / 0.25) + 0.1 * math.log(0.1 / 0.25)
    assert result.kl_windows == pytest.approx((kl_after_0 / 3, kl_after_0 / 3), rel=1e-5), "float32 logits"
    assert evaluate(engine, WINDOWS, None).kl_windows == ()


def test_without_reference_the_rest_is_null_and_says_why(engine):
    result = evaluate(engine, WINDOWS, None, note="the original is gone")
    assert result.to_json()["note"] == "the original is gone", "nulls need their reason"
    assert result.perplexity == pytest.approx(evaluate(engine, WINDOWS, Bigram(ORIGINAL)).perplexity)
    assert (result.reference_perplexity, result.kl_mean, result.top1_agreement) == (None, None, None)
    assert result.to_quality() is None
    console = Console(width=120)
    with console.capture() as capture:
        console.print(result.table())
    assert "the original is gone" in capture.get()


def test_quality_for_the_manifest_equals_the_result(engine):
    result = evaluate(engine, WINDOWS, Bigram(ORIGINAL))
    assert result.to_quality().model_dump() == {k: v for k, v in result.to_json().items() if k != "kl_windows"}


def test_progress_counts_windows(engine):
    seen = []
    evaluate(engine, WINDOWS, None, lambda *args: seen.append(args))
    assert seen == [(0, 2, "eval"), (1, 2, "eval"), (2, 2, "eval")]


def test_another_vocabulary_is_refused_naming_the_window(engine):
    with pytest.raises(MeasureError, match=r"scripted, window 0: reference logits have shape \[4, 2\], want \[4, 3\]"):
        evaluate(engine, WINDOWS % 2, Bigram([[0.5, 0.5], [0.5, 0.5]]))


def test_logits_that_are_not_finite_are_refused(engine):
    engine.scores = lambda tokens: np.full((len(tokens), 3), np.nan, np.float32)
    with pytest.raises(MeasureError, match="window 0: logits at position 0 are not finite"):
        evaluate(engine, WINDOWS, None)


def test_windows_longer_than_the_plan_takes_are_refused(scripted_engine):
    with pytest.raises(MeasureError, match="windows of 4 tokens exceed the plan's max_seq_len 3"):
        evaluate(scripted_engine(lambda *_: [], max_seq_len=3), WINDOWS, None)


@pytest.fixture
def plan(tmp_path, engine, word_tokenizer_json):
    path = tmp_path / "tiny.plan"
    write_plan(path, engine.manifest, [PlanTensor.from_bytes(module.TOKENIZER, word_tokenizer_json)])
    with Plan.open(path) as opened:
        yield opened


def test_eval_plan_without_the_original_measures_perplexity_only(plan, engine, monkeypatch, tmp_path):
    def gone(model, **_):
        assert model == "somewhere/tiny"
        raise CheckpointError("somewhere/tiny: no such folder")

    monkeypatch.setattr("optimc_passes.load.load_checkpoint", gone)
    result = eval_plan(engine, plan, cache_dir=tmp_path, windows=2, length=8)
    assert result.tokens == 14
    assert result.perplexity > 1
    assert result.kl_mean is None
    assert "somewhere/tiny: no such folder" in result.note


def test_an_explicit_reference_must_load(plan, engine, monkeypatch, tmp_path):
    def gone(model, **_):
        raise CheckpointError(f"{model}: no such folder")

    monkeypatch.setattr("optimc_passes.load.load_checkpoint", gone)
    with pytest.raises(CheckpointError, match="elsewhere: no such folder"):
        eval_plan(engine, plan, cache_dir=tmp_path, against="elsewhere", windows=2, length=8)


def test_a_changed_original_is_refused(plan, engine, monkeypatch, tmp_path, tiny_checkpoint):
    monkeypatch.setattr("optimc_passes.load.load_checkpoint", lambda model, **_: tiny_checkpoint)
    with pytest.raises(MeasureError, match=r"somewhere/tiny has changed since the plan was built .* --against"):
        eval_plan(engine, plan, cache_dir=tmp_path, windows=2, length=8)


def test_a_plan_cannot_ask_for_remote_code(engine, monkeypatch, tmp_path, tiny_checkpoint):
    manifest = engine.manifest
    recipe = {"model": {"source": "x", "revision": "abc", "trust_remote_code": True}}
    source = manifest.source.model_copy(update={"recipe": recipe, "model_hash": tiny_checkpoint.digest})
    seen = {}

    def load(model, **options):
        seen.update(options, model=model)
        return tiny_checkpoint

    monkeypatch.setattr("optimc_passes.load.load_checkpoint", load)
    module.load_reference(manifest.model_copy(update={"source": source}), cache_dir=tmp_path)
    assert seen == {"model": "somewhere/tiny", "revision": "abc", "trust_remote_code": False, "cache_dir": tmp_path}


def test_a_plan_without_tokenizer_has_nothing_to_be_evaluated_on(tmp_path, engine):
    path = tmp_path / "bare.plan"
    write_plan(path, engine.manifest, [])
    with Plan.open(path) as bare, pytest.raises(MeasureError, match="the plan has no tokenizer"):
        eval_plan(engine, bare, cache_dir=tmp_path)


def test_infinite_perplexity_is_not_an_error(scripted_engine):
    engine = scripted_engine(lambda *_: [], vocab_size=3)
    engine.scores = lambda tokens: np.tile(np.array([[0, -3e4, -3e4]], np.float32), (len(tokens), 1))
    assert evaluate(engine, np.array([[0, 1, 2]], np.int32), None) == EvalResult(math.inf, None, None, None, 2)
