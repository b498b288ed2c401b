"""What the engine's own arithmetic costs: the same quantized graph, in fp32 and as it is served."""

from __future__ import annotations

from pathlib import Path

from optimc.measure.divergence import WindowScore, score_window
from optimc.measure.evaluation import plan_windows
from optimc.plan import Plan
from optimc_runtime.engine import Engine

WINDOWS, WINDOW_TOKENS = 8, 512


def added_kl(plan: Path, oracle: Path) -> float:
    """Return the mean KL(oracle || plan) in nats per predicted token, both fed the same text through their engines.

    Raises ValueError if one of them predicts something that is not finite.
    """
    with Plan.open(plan) as opened:
        windows = plan_windows(opened, WINDOWS, WINDOW_TOKENS)
    total = WindowScore()
    with Engine.load(plan, trust=True) as engine, Engine.load(oracle, trust=True) as reference:
        for window in windows:
            total += score_window(window, engine.score(window.tolist()), reference.score(window.tolist()))
    return total.kl / total.predictions
