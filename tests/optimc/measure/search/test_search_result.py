"""Best, frontier, and how they are shown."""

import json

from rich.console import Console

from optimc.measure.search.search_result import SearchResult, Trial
from optimc.measure.search.space import Space

SPACE = Space({"passes.rtn.bits": (2, 4, 8, 16, 32)})


def trial(bits, objective, kl, state="measured", **more):
    return Trial({"passes.rtn.bits": bits}, state, objective, kl, 1_000_000, **more)


TRIALS = (
    trial(2, None, 0.9, "gate", reason="max_kl 0.5: measured 0.9"),
    trial(4, 2.0, 0.3),
    trial(8, 3.0, 0.1),
    trial(16, 4.0, 0.2),  # 8 bits beat it in both
    trial(32, 4.0, 0.0),
)


def test_the_frontier_holds_what_nothing_beats_in_both():
    result = SearchResult("r", SPACE, TRIALS, {})
    assert [each.parameters["passes.rtn.bits"] for each in result.frontier] == [4, 8, 32]
    assert result.best.parameters == {"passes.rtn.bits": 4}


def test_a_rate_is_better_the_larger_it_is():
    result = SearchResult("r", Space(SPACE.choices, "tokens_per_s"), TRIALS, {})
    assert result.best.objective == 4.0
    # 32 bits have the highest rate and no divergence: they beat all others.
    assert [each.parameters["passes.rtn.bits"] for each in result.frontier] == [32]


def test_json_names_best_and_frontier_and_trials_come_back():
    data = json.loads(json.dumps(SearchResult("r", SPACE, TRIALS, {}).to_json()))
    assert (data["format"], data["best"], data["frontier"]) == (1, 1, [1, 2, 4])
    assert tuple(map(Trial.from_json, data["trials"])) == TRIALS


def test_the_table_shows_what_was_not_measured_and_why():
    console = Console(width=100)
    with console.capture() as capture:
        console.print(SearchResult("r", SPACE, TRIALS, {}, ("gates: max_kl 0.5",)).table())
    shown = capture.get()
    assert "best tpot_p50_ms 2 with passes.rtn.bits 4; 5 of 5 points tried" in shown
    assert "gate: passes.rtn.bits 2: max_kl 0.5: measured 0.9" in shown
    assert "gates: max_kl 0.5" in shown


def test_without_a_good_point_it_says_so():
    console = Console(width=100)
    with console.capture() as capture:
        console.print(SearchResult("r", SPACE, TRIALS[:1], {}).table())
    assert "no point keeps the gates" in capture.get()
