"""Ticks are numbers people would choose; places are where they belong."""

import pytest

from optimc.measure.report.scale import format_tick, linear, log, nice_step


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        # 37 / 5 = 7.4, next of 1, 2, 5, 10: 10.
        ((3, 40), (0, 10, 20, 30, 40)),
        # 0.9 / 5 = 0.18: 0.2; the ends move outward to ticks.
        ((0.1, 1.0), (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        ((0.0, 0.0), (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
    ],
)
def test_linear_ticks(values, ticks):
    assert linear(values, 0, 100).ticks == ticks


def test_a_linear_scale_may_begin_at_zero():
    scale = linear((40, 60), 0, 100, from_zero=True)
    assert (scale.low, scale(0), scale(30)) == (0, 0, 50)


def test_one_value_stands_in_the_middle():
    # 10 alone: 5 to 15 in steps of 2; ticks 4 .. 16.
    scale = linear((10,), 0, 100)
    assert scale(10) == pytest.approx(50)


def test_log_ticks():
    # Less than 2.5 decades: 1, 2, 5; more: powers of ten; many: every second one.
    assert log((1, 50), 0, 1).ticks == (1, 2, 5, 10, 20, 50)
    assert log((1e-3, 1), 0, 1).ticks == (1e-3, 1e-2, 1e-1, 1)
    assert log((1e-6, 1), 0, 1).ticks == (1e-6, 1e-4, 1e-2, 1)


def test_log_places():
    scale = log((1, 100), 0, 100)
    assert scale(10) == pytest.approx(50)
    with pytest.raises(ValueError, match="above 0, got 0"):
        log((0, 1), 0, 1)


def test_steps_and_labels():
    assert [nice_step(rough) for rough in (0.7, 1, 1.1, 3, 6, 70)] == [1, 1, 2, 5, 10, 100]
    shown = [format_tick(v) for v in (0, 0.05, 0.3, 20, 1500, 1e-6, 2.5e6)]
    assert shown == ["0", "0.05", "0.3", "20", "1,500", "1e-6", "2.5e6"]
