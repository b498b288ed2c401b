"""Which build goes when, on a clock that a script moves."""

from pathlib import Path

import pytest

from optimc.errors import MeasureError
from optimc.measure.compare.build_jobs import BuildJob, available_bytes, estimated_need, run_builds


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
        run_builds(jobs, most=most, memory_bytes=memory_bytes, start=self.start, pause=self.pause, **options)
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


def test_a_failing_build_ends_the_others_and_names_itself():
    yard = Yard({"a": 9, "b": 2, "c": 1}, {"b": 2})
    with pytest.raises(MeasureError, match="b: building b.yaml failed with status 2: out of luck"):
        yard.run(job("a"), job("b"), job("c"), most=2)
    assert yard.stopped == ["a"]
    assert [names for _, names in yard.journal] == [("a",), ("a", "b")]


def test_a_build_that_was_killed_says_by_what():
    with pytest.raises(MeasureError, match="was ended by signal 9"):
        Yard({"a": 1}, {"a": -9}).run(job("a"))


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


def test_free_memory_is_read_from_the_system(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  4096 kB\nMemFree:  1 kB\nMemAvailable:   2048 kB\n")
    assert available_bytes(file) == 2048 * 1024
    with pytest.raises(MeasureError, match="--max-host-bytes"):
        available_bytes(tmp_path / "nothing")
