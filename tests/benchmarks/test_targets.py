from peer.names import CONCURRENT, LLAMA_SERVER, OPENVINO, OPTIMC, UNITS
from peer.samples import Samples
from peer.sections import SECTIONS
from peer.targets import TARGETS, FasterThan, SlowsTo, StaysBelow, judge


def test_the_best_of_the_others_counts():
    target = FasterThan("concurrent", CONCURRENT, (LLAMA_SERVER, OPENVINO), 1.5)
    assert target.judge(Samples({CONCURRENT: {OPTIMC: [300], LLAMA_SERVER: [100], OPENVINO: [200]}})).outcome == "pass"
    assert target.judge(Samples({CONCURRENT: {OPTIMC: [299], LLAMA_SERVER: [100], OPENVINO: [200]}})).outcome == "fail"


def test_a_target_needs_every_one_it_names():
    target = FasterThan("concurrent", CONCURRENT, (LLAMA_SERVER, OPENVINO), 1.5)
    verdict = target.judge(Samples({CONCURRENT: {OPTIMC: [300], OPENVINO: [1]}}))
    assert (verdict.figure, verdict.outcome) == (None, "not measured")


def test_slowing_down_is_judged_against_our_own_speed():
    target = SlowsTo("context", "long", "short", 0.6)
    assert target.judge(Samples({"long": {OPTIMC: [70]}, "short": {OPTIMC: [100]}})).outcome == "pass"
    assert target.judge(Samples({"long": {OPTIMC: [50]}, "short": {OPTIMC: [100]}})).outcome == "fail"


def test_a_limit_itself_is_too_much():
    target = StaysBelow("overhead", "share", 10.0, "%")
    assert target.judge(Samples({"share": {OPTIMC: [9.9]}})).outcome == "pass"
    assert target.judge(Samples({"share": {OPTIMC: [10.0]}})).outcome == "fail"


def test_nothing_measured_is_no_failure():
    assert {verdict.outcome for verdict in judge({})} == {"not measured"}


def test_every_target_belongs_to_a_section_that_runs():
    assert {target.section for target in TARGETS} <= set(SECTIONS)
    assert list(SECTIONS) == list(UNITS)
