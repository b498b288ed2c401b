import json
import os
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from optimc.errors import (
    CheckpointError,
    ConfigError,
    MeasureError,
    OverloadedError,
    PlanTargetError,
    StorageError,
)
from optimc.measure.bench import bench_driver
from optimc.measure.compare.compare_plans import compare
from optimc.measure.compare.comparison import mark_front
from optimc.measure.compare.config import CompareConfig
from optimc.measure.compare.cost import Price
from optimc.measure.compare.failure import Failure
from optimc.measure.compare.row import KL_FLOOR
from optimc.measure.engine_driver import EngineDriver
from optimc.measure.load.slo import Slo
from optimc.measure.roofline.row_bound import RowBound
from optimc.plan import PlanTensor, write_plan

CONFIG = CompareConfig(
    prompt_tokens=16, output_tokens=3, concurrencies=(1, 2), requests=4, warmup_requests=0, windows=2, length=8
)
ORIGINAL = [[0.4, 0.5, 0.1], [0.2, 0.2, 0.6], [0.3, 0.4, 0.3]]
ROUGH = [[0.5, 0.25, 0.25]] * 3


def bigram(table):
    rows = np.log(np.asarray(table)).astype(np.float32)
    return lambda tokens: rows[np.asarray(tokens)]


class Original:
    logits = staticmethod(bigram(ORIGINAL))


class World:
    """Plans on disk, an engine for each, and a journal of what happened in which order."""

    def __init__(self, folder, make_manifest, tokenizer_json, scripted_engine, steady_script, virtual_time_factory):
        self.folder = folder
        self.journal: list[str] = []
        self.references = 0
        self.benches: list[int] = []
        self._make_manifest = make_manifest
        self._tokenizer_json = tokenizer_json
        self._scripted_engine = scripted_engine
        self._steady_script = steady_script
        self._virtual_time_factory = virtual_time_factory
        self._engines = {}

    def plan(self, name, *, ttft_s=0.1, tpot_s=0.01, table=ORIGINAL, quality=None, payload=0, script=None, **manifest):
        recipe = {"quality": quality} if quality else {}
        path = self.folder / f"{name}.plan"
        described = self._make_manifest(vocab_size=3, recipe=recipe, **manifest).model_copy(update={"name": name})
        tensors = [
            PlanTensor.from_bytes("tokenizer/tokenizer.json", self._tokenizer_json),
            PlanTensor.from_bytes("weights/x", name.encode() + bytes(payload)),
        ]
        write_plan(path, described, tensors)
        self._engines[path] = (script or self._steady_script(ttft_s, tpot_s), table)
        return path

    def build(self, recipes):
        self.journal += [f"build {recipe.stem}" for recipe in recipes]
        return {recipe: self.folder / f"{recipe.stem}.plan" for recipe in recipes}

    def open_engine(self, path):
        script, table = self._engines[path]
        engine = self._scripted_engine(script, vocab_size=384)
        engine.scores = bigram(table)
        self.journal.append(f"open {path.stem}")
        close = engine.close

        def closing():
            self.journal.append(f"close {path.stem}")
            close()

        engine.close = closing
        return engine

    def reference(self, manifest):
        self.references += 1
        self.journal.append("load original")
        return Original()

    def bench(self, engine, config, progress, *, bound):
        time = self._virtual_time_factory()
        self.benches.append(config.concurrency)
        result = time.run(bench_driver(EngineDriver(engine, time.clock), config, time.clock, "run", progress))
        return result if bound is None else replace(result, bound=bound(result))

    def compare(self, *items, config=CONFIG, **options):
        options.setdefault("reference_for", self.reference)
        return compare(
            items,
            config,
            build=self.build,
            open_engine=self.open_engine,
            cache_dir=self.folder / "cache",
            bench=self.bench,
            **options,
        )


@pytest.fixture
def world(tmp_path, make_manifest, word_tokenizer_json, scripted_engine, steady_script, virtual_time):
    return World(tmp_path, make_manifest, word_tokenizer_json, scripted_engine, steady_script, type(virtual_time))


def test_one_row_per_item_with_figures_by_hand(world):
    exact_path = world.plan("exact", ttft_s=0.2, tpot_s=0.02)
    world.plan("fast", ttft_s=0.1, tpot_s=0.01, table=ROUGH, payload=1000)
    result = world.compare(exact_path, world.folder / "fast.yaml")
    exact, fast = result.rows
    assert [row.name for row in result.rows] == ["exact", "fast"]
    assert exact.size_bytes == exact_path.stat().st_size < fast.size_bytes
    report = fast.to_json()
    assert report["ttft_p50_ms"] == pytest.approx(100)
    assert report["tpot_p50_ms"] == pytest.approx(10)
    assert report["output_tokens_per_s"]["1"] == pytest.approx(3 / 0.12)
    assert report["output_tokens_per_s"]["2"] == pytest.approx(2 * 3 / 0.12, rel=0.2)
    assert (exact.measurement.quality.kl_mean, exact.measurement.quality.top1_agreement) == (0, 1)
    assert report["kl_mean"] > 0
    assert report["tokens"] == 14
    assert [row.on_front for row in result.rows] == [True, True]
    assert result.ok


def test_one_engine_at_a_time_after_all_builds_and_the_original(world):
    a, _ = world.plan("a"), world.plan("b")
    world.compare(a, world.folder / "b.yaml")
    assert world.journal == ["build b", "load original", "open a", "close a", "open b", "close b"]


def test_measurements_are_kept_by_plan_and_configuration(world):
    a, b = world.plan("a"), world.plan("b")
    first = world.compare(a, b)
    world.journal.clear()
    again = world.compare(a, b)
    assert world.journal == []
    assert [row.cached for row in again.rows] == [True, True]
    assert [row.to_json()["loads"] for row in again.rows] == [row.to_json()["loads"] for row in first.rows]
    assert [row.measurement.quality for row in again.rows] == [row.measurement.quality for row in first.rows]
    world.plan("b", payload=1)
    world.compare(a, b)
    assert world.journal == ["load original", "open b", "close b"]


@pytest.mark.parametrize(
    ("lengths", "said"),
    [({"prompt_tokens": 5000}, "5000 prompt . 3 output tokens exceed"), ({"length": 5000}, "windows of 5000 tokens")],
)
def test_lengths_a_plan_cannot_serve_are_refused_before_anything_is_measured(world, lengths, said):
    with pytest.raises(MeasureError, match=rf"b: .*{said}"):
        world.compare(world.plan("a", max_seq_len=8192), world.plan("b"), config=replace(CONFIG, **lengths))
    assert world.journal == []


def test_other_limits_are_another_measurement(world):
    world.compare(world.plan("a"))
    world.journal.clear()
    world.compare(world.plan("a", max_seqs=4))
    assert "open a" in world.journal


def test_other_threads_are_another_measurement(world):
    a = world.plan("a")
    world.compare(a)
    world.journal.clear()
    world.compare(a, config=replace(CONFIG, threads=1))
    assert "open a" in world.journal


def test_fresh_measures_again(world):
    a = world.plan("a")
    world.compare(a)
    world.journal.clear()
    assert not world.compare(a, fresh=True).rows[0].cached
    assert world.journal == ["load original", "open a", "close a"]


def test_a_damaged_measurement_is_named(world):
    a = world.plan("a")
    world.compare(a)
    files = sorted((world.folder / "cache" / "measurements").iterdir())
    assert len(files) == 3
    files[0].write_text('{"measurement": {}}')
    with pytest.raises(MeasureError, match=f"{files[0].name}: not a measurement"):
        world.compare(a)


def test_only_what_is_missing_is_measured(world):
    a = world.plan("a")
    world.compare(a, config=replace(CONFIG, concurrencies=(1,)))
    world.benches.clear()
    result = world.compare(a)
    assert world.benches == [2]
    row = result.rows[0]
    assert [(origin.what, origin.cached) for origin in row.measurement.origins] == [
        ("bench @1", True),
        ("bench @2", False),
        ("quality", True),
    ]
    assert not row.cached
    assert "measured earlier: a (bench @1, quality: 20" in result.markdown()


def test_what_was_measured_before_a_failure_is_kept(world):
    a = world.plan("a", table=[[np.nan] * 3] * 3)
    with pytest.raises(MeasureError, match="not finite"):
        world.compare(a)
    world.benches.clear()
    with pytest.raises(MeasureError, match="not finite"):
        world.compare(a)
    assert world.benches == []


def test_a_plan_that_cannot_be_measured_costs_the_others_nothing(world):
    broken = world.plan("broken", table=[[np.nan] * 3] * 3)
    result = world.compare(broken, world.plan("good"))
    assert [row.name for row in result.rows] == ["good"]
    assert [(failure.name, failure.path) for failure in result.failures] == [("broken", broken)]
    assert "not finite" in result.failures[0].reason
    assert not result.ok
    assert "- broken: no figures: scripted, window 0: " in result.markdown()
    assert json.loads(json.dumps(result.to_json()))["failures"][0]["name"] == "broken"


def test_a_plan_that_cannot_be_opened_costs_the_others_nothing(world):
    foreign, opened = world.plan("foreign"), world.open_engine

    def open_engine(path):
        if path == foreign:
            raise PlanTargetError("built for another machine")
        return opened(path)

    world.open_engine = open_engine
    result = world.compare(foreign, world.plan("good"))
    assert [str(failure) for failure in result.failures] == ["foreign: no figures: built for another machine"]
    assert result.rows[0].measurement.quality.kl_mean == 0


def test_an_original_that_has_changed_costs_the_plans_of_others_nothing(world):
    def reference(manifest):
        if manifest.name == "old":
            raise MeasureError("the model has changed since the plan was built")
        return Original()

    result = world.compare(world.plan("old"), world.plan("new"), reference_for=reference)
    assert [row.name for row in result.rows] == ["new"]
    assert "has changed" in result.failures[0].reason


def test_a_recipe_that_cannot_be_built_costs_the_others_nothing(world):
    world.plan("good")
    failed = Failure("bad", world.folder / "bad.yaml", "building bad.yaml failed with status 2")
    world.build = lambda recipes: {r: world.folder / "good.plan" if r.stem == "good" else failed for r in recipes}
    result = world.compare(world.folder / "bad.yaml", world.folder / "good.yaml")
    assert [row.name for row in result.rows] == ["good"]
    assert result.failures == (failed,)


def test_a_damaged_measurement_costs_the_other_plans_nothing(world):
    a, b = world.plan("a"), world.plan("b")
    world.compare(a)
    for file in (world.folder / "cache" / "measurements").iterdir():
        file.write_text("{}")
    result = world.compare(a, b)
    assert [row.name for row in result.rows] == ["b"]
    assert "not a measurement" in result.failures[0].reason


def test_gates_that_cannot_be_read_are_found_before_the_plan_is_measured(world):
    result = world.compare(world.plan("other", quality={"max_surprise": 3}), world.plan("good"))
    assert "the quality gates of its recipe cannot be read" in result.failures[0].reason
    assert "open other" not in world.journal


def test_where_every_plan_fails_each_is_told(world):
    nan = [[np.nan] * 3] * 3
    with pytest.raises(MeasureError, match=r"(?s)a: no figures: .*not finite.*\nb: no figures: .*not finite"):
        world.compare(world.plan("a", table=nan), world.plan("b", table=nan))


def test_where_figures_cannot_be_kept_nothing_more_is_measured(world):
    def bench(*_args, **_options):
        raise StorageError("the measurement cannot be written: no room")

    world.bench = bench
    with pytest.raises(StorageError):
        world.compare(world.plan("a"), world.plan("b"))
    assert "open b" not in world.journal


def test_a_divergence_that_is_no_number_beats_nobody(world):
    (row,) = world.compare(world.plan("a")).rows
    measured = row.measurement
    nameless = replace(row, measurement=replace(measured, quality=replace(measured.quality, kl_mean=float("nan"))))
    assert [r.on_front for r in mark_front([row, nameless])] == [True, False]


def test_the_price_of_a_machine_becomes_the_cost_of_a_million_tokens(world):
    # One client: 3 tokens in 0.1 + 2 * 0.01 s = 25 tokens/s; two: twice that. 0.36 an hour is 0.0001 a second, so
    # that a million tokens at 50 a second, 20,000 s, cost 2.
    a = world.plan("a")
    result = world.compare(a, config=replace(CONFIG, requests=40), price=Price(0.36, "EUR"))
    assert result.rows[0].cost == pytest.approx(2, rel=0.05)  # 5%: the steady window of 40 requests has edges
    assert "| EUR/M tok |" in result.markdown()
    assert "EUR per million output tokens at the best concurrency" in result.markdown()
    assert "tok |" not in world.compare(a).markdown().splitlines()[0].replace("tok/s", "")


def test_a_price_must_be_a_price():
    with pytest.raises(ConfigError) as caught:
        Price(0, " ")
    assert [fault.where for fault in caught.value.faults] == ["--machine-price", "--currency"]


def test_a_bound_has_its_column_and_its_note(world):
    bound = RowBound(5.0, 0.5, None, None, "memory", None, "rates of another day")
    a = world.plan("a")
    result = world.compare(a, bound_for=lambda subject: lambda result: bound)
    assert "| bound @1 | bound @2 |" in result.markdown()
    assert "| 50% | 50% |" in result.markdown()
    assert "a: rates of another day" in result.markdown()
    assert world.compare(a).rows[0].measurement.loads[0].bound == bound


def test_a_ladder_needs_limits():
    with pytest.raises(ConfigError, match="ladder: needs limits"):
        CompareConfig(ladder=True)
    with pytest.raises(ConfigError, match="rates: are those of a ladder"):
        CompareConfig(rates=(1.0,))
    assert CompareConfig(ladder=True, slo=Slo(ttft_ms=500)).setting.startswith(
        "512 prompt + 128 output tokens, limits ttft <= 500 ms"
    )


def test_recorded_logits_are_removed_those_of_a_killed_run_too(world):
    cache = world.folder / "cache"
    left = cache / "tmp" / "left"
    left.mkdir(parents=True)
    (left / "0.npy").write_bytes(b"logits")
    os.utime(left, (1, 1))
    world.compare(world.plan("a"))
    assert sorted(path.name for path in cache.iterdir()) == ["measurements", "tmp"]
    assert list((cache / "tmp").iterdir()) == []


def test_failed_gates_are_listed_and_off_the_front(world):
    bad = world.plan("bad", ttft_s=0.01, table=[[0.1, 0.1, 0.8]] * 3, quality={"max_kl": 1e-3, "min_top1": None})
    result = world.compare(bad, world.plan("good", quality={"max_kl": 1e-3}))
    assert not result.ok
    row = result.rows[0]
    assert len(row.problems) == 1
    assert row.problems[0].startswith("max_kl 0.001: measured ")
    assert [r.on_front for r in result.rows] == [False, True]
    assert not world.compare(bad).ok  # gates are judged anew on kept figures


def test_failed_requests_are_a_problem_and_not_kept(world, steady_script):
    steady = steady_script(0.1, 0.01)

    def script(number, prompt_ids, max_tokens):
        if number == 1:
            raise OverloadedError("queue full")
        return steady(number, prompt_ids, max_tokens)

    a = world.plan("a", script=script)
    result = world.compare(a)
    assert result.rows[0].problems == (
        "1 of 4 requests failed at concurrency 1; the most frequent reason: OverloadedError: queue full",
    )
    world.journal.clear()
    world.compare(a)
    assert "open a" in world.journal


def test_the_engine_is_closed_when_measuring_fails(world):
    a = world.plan("a", table=[[np.nan] * 3] * 3)
    with pytest.raises(MeasureError, match="not finite"):
        world.compare(a)
    assert world.journal[-1] == "close a"


def test_without_the_original_there_is_perplexity_only_and_it_is_tried_again(world):
    def gone(manifest):
        raise CheckpointError("no such folder")

    a = world.plan("a")
    result = world.compare(a, reference_for=gone)
    quality = result.rows[0].measurement.quality
    assert quality.perplexity > 1
    assert quality.kl_mean is None
    assert not result.rows[0].on_front
    assert "the original model cannot be loaded (no such folder)" in result.markdown()
    assert world.compare(a).rows[0].measurement.quality.kl_mean == 0


def test_the_original_is_loaded_once_for_all_plans_of_it(world):
    world.compare(world.plan("a"), world.plan("b"), world.plan("c"))
    assert world.references == 1


def test_the_same_plan_twice_is_measured_once(world):
    a = world.plan("a")
    result = world.compare(a, a)
    assert world.journal.count("open a") == 1
    assert len(result.rows) == 2


def test_plans_of_one_name_are_told_apart(world):
    a = world.plan("a")
    other = world.folder / "other"
    other.mkdir()
    world.folder, folder = other, world.folder
    b = world.plan("a", payload=5)
    world.folder = folder
    names = [row.name for row in world.compare(a, b).rows]
    assert names == [f"a ({a})", f"a ({b})"]


def test_table_markdown_and_json_show_the_same_figures(world):
    fast = world.plan("fast", ttft_s=0.1, table=ROUGH)
    result = world.compare(world.plan("exact", ttft_s=0.2, tpot_s=0.02), fast)
    lines = result.markdown().splitlines()
    assert lines[0] == "| plan | MB | TTFT ms | TPOT ms | tok/s @1 | tok/s @2 | perplexity | KL | top-1 | front |"
    assert lines[2].startswith("| exact | 0.0 | 200.0 | 20.00 | 12.5 |")
    assert lines[2].endswith("| 0 | 100.00% | ● |")
    console = Console(width=80)
    with console.capture() as capture:
        console.print(result.table())
    shown = capture.get()
    assert "Pareto front" in shown
    assert "…" not in shown
    assert [line.split()[0] for line in shown.splitlines() if " exact " in line] == ["●"]
    report = json.loads(json.dumps(result.to_json()))
    assert [row["name"] for row in report["rows"]] == ["exact", "fast"]
    assert report["machine"]["id"]


def test_kl_within_rounding_is_no_advantage(world):
    (row,) = world.compare(world.plan("a")).rows
    assert row.costs[2] == KL_FLOOR
    assert [r.on_front for r in mark_front([row, row])] == [True, True]


def test_progress_names_the_plan(world):
    seen = set()
    world.compare(world.plan("a"), progress=lambda done, total, label: seen.add(label))
    assert seen == {"original model", "a: bench, concurrency 1", "a: bench, concurrency 2", "a: eval"}


def test_bad_options_and_nothing_to_do_are_refused(world):
    with pytest.raises(ConfigError) as caught:
        CompareConfig(concurrencies=(8, 1), windows=0, length=1)
    assert [fault.where for fault in caught.value.faults] == ["concurrencies", "windows", "length"]
    with pytest.raises(ConfigError, match="prompt_tokens: must be at least 1"):
        CompareConfig(prompt_tokens=0)
    with pytest.raises(MeasureError, match="nothing to compare"):
        world.compare()


def test_too_few_requests_for_a_concurrency_are_raised_to_it():
    configs = CompareConfig(concurrencies=(1, 8), requests=4).benches()
    assert [config.num_requests for config in configs] == [4, 8]
