from optimc.measure.compare.gates import failed_gates
from optimc.measure.evaluation import EvalResult
from optimc.recipe import QualitySpec

MEASURED = EvalResult(perplexity=16.0, reference_perplexity=10.0, kl_mean=0.05, top1_agreement=0.9, tokens=100)


def test_gates_at_their_bound_hold():
    assert failed_gates(QualitySpec(max_kl=0.05, min_top1=0.9, max_perplexity_ratio=1.6), MEASURED) == ()


def test_each_gate_that_fails_says_limit_and_value():
    assert failed_gates(QualitySpec(max_kl=0.04, min_top1=0.95, max_perplexity_ratio=1.5), MEASURED) == (
        "max_kl 0.04: measured 0.05",
        "min_top1 0.95: measured 0.9",
        "max_perplexity_ratio 1.5: measured 1.6",
    )


def test_no_gates_no_failures():
    assert failed_gates(QualitySpec(), MEASURED) == ()


def test_what_was_not_measured_does_not_pass():
    alone = EvalResult(16.0, None, None, None, 100)
    assert failed_gates(QualitySpec(max_kl=1.0, max_perplexity_ratio=2.0), alone) == (
        "max_kl 1: not measured",
        "max_perplexity_ratio 2: not measured",
    )
