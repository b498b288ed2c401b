"""Which build goes when, on a clock that a script moves."""

from pathlib import Path

import pytest

from optimc.errors import MeasureError
from optimc.measure.compare.build_jobs import BuildJob, estimated_need, memory_for_builds, run_builds


def job(name, need=1, shares=None):
    return BuildJob(name, Path(f"{name}.yaml"), Path(f"{name}.plan"), need, shares or name)


class Yard:
    """Starts builds that end after so many pauses, and writes down who runs beside whom."""

    def __init__(self, lengths, statuses=None):
        self.lengths = lengths
        self.statuses = statuses or {}
        self.now = 0
        self.running = {}
        self.journal = []
        self.stopped = []

    def start(self, started):
        build = Build(self, started)
        self.running[started.name] = build
        self.journal.append((self.now, tuple(sorted(self.running))))
        return build

    def pause(self):
        self.now += 1

    def run(self, *jobs, most=9, memory_bytes=100, **options):
        self.failed = run_builds(
            jobs, most=most, memory_bytes=memory_bytes, start=self.start, pause=self.pause, **options
        )
        return self.journal


class Build:
    def __init__(self, yard, started):
        self.yard, self.job = yard, started
        self.ends_at = yard.now + yard.lengths[started.name]
        self.told = False

    def poll(self):
        if self.yard.now < self.ends_at:
            return None
        self.yard.running.pop(self.job.name, None)
        return self.yard.statuses.get(self.job.name, 0)

    def news(self):
        told, self.told = self.told, True
        return [] if told else [(0, 1, "rtn")]

    def last_words(self):
        return "out of luck"

    def stop(self):
        self.yard.stopped.append(self.job.name)


def test_as_many_run_at_once_as_are_allowed():
    yard = Yard({"a": 2, "b": 1, "c": 1})
    assert yard.run(job("a"), job("b"), job("c"), most=2) == [(0, ("a",)), (0, ("a", "b")), (1, ("a", "c"))]


def test_builds_never_need_more_than_the_memory_together():
    needs = {"a": 60, "b": 50, "c": 40, "d": 30}
    yard = Yard({"a": 3, "b": 2, "c": 1, "d": 1})
    journal = yard.run(*(job(name, need) for name, need in needs.items()))
    # a and c fill it; d goes when c has ended (60 + 30), b (50) when a has.
    assert journal == [(0, ("a",)), (0, ("a", "c")), (1, ("a", "d")), (3, ("b",))]
    assert all(sum(needs[name] for name in names) <= 100 for _, names in journal)


def test_a_build_that_needs_more_than_there_is_runs_alone():
    yard = Yard({"small": 2, "huge": 1, "late": 1})
    assert yard.run(job("small", 10), job("huge", 500), job("late", 10)) == [
        (0, ("small",)),
        (0, ("late", "small")),
        (2, ("huge",)),
    ]


def test_of_builds_that_begin_alike_the_first_goes_ahead():
    yard = Yard({"a": 2, "b": 1, "c": 1, "other": 1})
    journal = yard.run(job("a", shares="rtn"), job("b", shares="rtn"), job("c", shares="rtn"), job("other"))
    assert journal == [(0, ("a",)), (0, ("a", "other")), (2, ("b",)), (2, ("b", "c"))]


def test_the_others_go_on_beside_and_after_a_build_that_fails():
    yard = Yard({"a": 4, "b": 2, "c": 1}, {"b": 2})
    assert yard.run(job("a"), job("b"), job("c"), most=2) == [(0, ("a",)), (0, ("a", "b")), (2, ("a", "c"))]
    assert yard.failed == {job("b"): "building b.yaml failed with status 2: out of luck"}
    assert yard.stopped == ["b", "c", "a"], "what has ended is let go at once"


def test_where_the_first_of_builds_that_begin_alike_fails_the_next_goes_ahead():
    yard = Yard({"a": 2, "b": 1, "c": 1}, {"a": 1})
    journal = yard.run(job("a", shares="rtn"), job("b", shares="rtn"), job("c", shares="rtn"))
    assert journal == [(0, ("a",)), (2, ("b",)), (3, ("c",))]


def test_a_build_that_was_killed_says_by_what():
    yard = Yard({"a": 1}, {"a": -9})
    yard.run(job("a"))
    assert "was ended by signal 9" in yard.failed[job("a")]


def test_an_interruption_ends_all_builds():
    yard = Yard({"a": 9, "b": 9})

    def interrupted():
        raise KeyboardInterrupt

    yard.pause = interrupted
    with pytest.raises(KeyboardInterrupt):
        yard.run(job("a"), job("b"))
    assert yard.stopped == ["a", "b"]


def test_progress_names_the_recipe():
    seen = []
    Yard({"a": 1}).run(job("a"), progress=lambda *news: seen.append(news))
    assert seen == [(0, 1, "a: rtn")]


def test_the_need_is_that_of_an_earlier_build_or_thrice_the_checkpoint():
    assert estimated_need([5, 7, 6], checkpoint_bytes=1000) == 7
    assert estimated_need([], checkpoint_bytes=1000) == 3000 + 2**30


def test_builds_share_most_of_what_is_free_or_what_the_user_allows():
    assert memory_for_builds(None, 2, lambda: 1000) == 800
    assert memory_for_builds(500, 2, lambda: None) == 500


def test_only_builds_at_once_need_to_know_how_much_is_free():
    with pytest.raises(MeasureError, match="--max-host-bytes, or --build-jobs 1"):
        memory_for_builds(None, 2, lambda: None)
    yard = Yard({"a": 1, "b": 1})
    assert yard.run(job("a"), job("b"), most=1, memory_bytes=memory_for_builds(None, 1, lambda: None)) == [
        (0, ("a",)),
        (1, ("b",)),
    ]
