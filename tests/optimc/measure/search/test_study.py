"""The search: by a scripted sampler, and by optuna where it is installed."""

import pytest

from optimc.errors import MeasureError
from optimc.measure.search.search_result import SearchResult, Trial
from optimc.measure.search.space import Space
from optimc.measure.search.study import OptunaSampler, journal_path, search

GRID = Space({"a": (1, 2, 3, 4), "b": (0, 10, 20)})
"""Twelve points."""


class ScriptedSampler:
    """Proposes what it is told to, over and over; remembers."""

    def __init__(self, points, known=()):
        self._points = points
        self._known = known
        self._turn = 0
        self.told = []

    def earlier(self):
        return tuple(self._known)

    def ask(self, parameters=None):
        if parameters is not None:
            return parameters
        self._turn += 1
        return self._points[(self._turn - 1) % len(self._points)]

    def tell(self, trial, *, repeated=False):
        self.told.append((trial, repeated))


class Runner:
    """(a - 3)^2 + b: best at a = 3, b = 0."""

    def __init__(self):
        self.seen = []

    def __call__(self, parameters):
        self.seen.append(dict(parameters))
        value = (parameters["a"] - 3) ** 2 + parameters["b"]
        return Trial(dict(parameters), "measured", float(value), kl=0.1)


def best(trials):
    return SearchResult("r", GRID, trials, {}).best


def test_every_point_of_a_small_grid_is_tried_once_even_if_the_sampler_repeats_itself():
    run = Runner()
    trials = search(GRID, ScriptedSampler([{"a": 1, "b": 0}]), run, trials=20)
    assert (len(trials), len(run.seen)) == (12, 12)
    assert best(trials).parameters == {"a": 3, "b": 0}


def test_a_known_point_is_answered_without_measuring_it():
    run, sampler = Runner(), ScriptedSampler([{"a": 1, "b": 0}, {"a": 1, "b": 0}, {"a": 2, "b": 0}])
    search(GRID, sampler, run, trials=2)
    assert run.seen == [{"a": 1, "b": 0}, {"a": 2, "b": 0}]
    assert [repeated for _, repeated in sampler.told] == [False, True, False]


def test_trials_of_earlier_runs_count_and_are_not_repeated():
    known = [Trial({"a": 1, "b": 0}, "measured", 4.0), Trial({"a": 2, "b": 0}, "gate", reason="max_kl")]
    run = Runner()
    trials = search(GRID, ScriptedSampler([{"a": 1, "b": 0}, {"a": 2, "b": 0}, {"a": 3, "b": 0}], known), run, trials=3)
    assert run.seen == [{"a": 3, "b": 0}]
    assert trials[:2] == tuple(known)


def test_no_trial_begins_after_the_budget():
    now = iter(range(0, 1000, 10))
    run = Runner()
    # The clock reads 0 at the start, then 10, 20, 30 before a trial: the third one would begin at 30.
    search(GRID, ScriptedSampler(list(GRID.points())), run, trials=12, budget_s=30, clock=lambda: next(now))
    assert len(run.seen) == 2


@pytest.fixture
def optuna_sampler(tmp_path):
    pytest.importorskip("optuna")
    return lambda **options: OptunaSampler(GRID, tmp_path / "search" / "study.log", **options)


def test_optuna_finds_the_best_of_twelve_points(optuna_sampler):
    trials = search(GRID, optuna_sampler(), Runner(), trials=12)
    assert len(trials) == 12
    assert best(trials).parameters == {"a": 3, "b": 0}


def test_optuna_resumes_from_its_journal_and_repeats_no_trial(optuna_sampler):
    first, second = Runner(), Runner()
    before = search(GRID, optuna_sampler(), first, trials=5)
    after = search(GRID, optuna_sampler(), second, trials=9)
    assert after[:5] == before
    assert len(second.seen) == 4
    assert not [point for point in second.seen if point in first.seen]
    third = Runner()
    search(GRID, optuna_sampler(fresh=True), third, trials=5)
    assert len(third.seen) == 5, "--fresh starts over"


def test_a_trial_that_was_under_way_when_its_run_died_is_tried_again(optuna_sampler):
    def dies(parameters):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(GRID, optuna_sampler(), dies, trials=3)
    assert optuna_sampler().earlier() == ()
    assert len(search(GRID, optuna_sampler(), Runner(), trials=12)) == 12


def test_the_same_seed_proposes_the_same_points(tmp_path):
    pytest.importorskip("optuna")
    runs = []
    for name in ("one", "two"):
        run = Runner()
        search(GRID, OptunaSampler(GRID, tmp_path / name, seed=5), run, trials=6)
        runs.append(run.seen)
    assert runs[0] == runs[1]


def test_pruned_and_failed_trials_are_kept_whole(optuna_sampler):
    pruned = Trial({"a": 1, "b": 0}, "gate", kl=0.5, reason="max_kl 0.1: measured 0.5", violation=4.0)
    refused = Trial({"a": 2, "b": 0}, "refused", reason="no such thing")
    sampler = optuna_sampler()
    for trial in (pruned, refused):
        sampler.ask(trial.parameters)
        sampler.tell(trial)
    assert optuna_sampler().earlier() == (pruned, refused)


def test_another_space_or_load_is_another_study(tmp_path):
    one = journal_path(tmp_path, GRID, "r", {"concurrency": 1})
    assert one != journal_path(tmp_path, GRID, "r", {"concurrency": 8})
    assert one != journal_path(tmp_path, Space({"a": (1, 2)}), "r", {"concurrency": 1})
    assert one == journal_path(tmp_path, GRID, "r", {"concurrency": 1})


@pytest.mark.parametrize("data", [b'{"op_code": 9\n{}\n', b"\xff\xfe\n{}\n", b"[]\n{}\n", b"{}\n"])
def test_a_damaged_journal_is_refused_by_name_and_replaced_by_fresh(tmp_path, data):
    pytest.importorskip("optuna")
    journal = tmp_path / "search.log"
    journal.write_bytes(data)
    with pytest.raises(MeasureError, match="search.log: not a search's journal .*--fresh"):
        OptunaSampler(GRID, journal)
    assert OptunaSampler(GRID, journal, fresh=True).earlier() == ()
