"""An attribution in a world whose gains are planted."""

import json
import math

import pytest
from rich.console import Console

from optimc.errors import ConfigError, Fault, LoweringError, MeasureError, StorageError
from optimc.measure.attribution.attribute import attribute
from optimc.measure.attribution.attribution import Attribution
from optimc.measure.attribution.config import AttributeConfig
from optimc.measure.attribution.effect import Effect
from optimc.measure.load.slo import Slo

# One client, no load of its own for the runtime's features: what is planted is passes.
CONFIG = AttributeConfig(mode="leave-one-out", pairs=3, concurrencies=(1,), prompt_tokens=8, output_tokens=4, windows=0)
LOAD = "8+4 tokens, concurrency 1"


def by_factor(result, mode="without"):
    return {row.factor: row for row in result.rows if row.mode == mode}


def test_planted_gains_come_out_and_multiplying_ones_do_not_interact(world):
    world.slower = {"rtn": 2.0, "fuse": 1.5}
    result = attribute(world.recipe("rtn", "fuse"), CONFIG, world.around())
    rows = by_factor(result)
    # With / without: 10 ms / 20 ms and 10 ms / 15 ms; both off 30 ms.
    assert rows["rtn[0]"].metrics["tpot_p50"].value == pytest.approx(1 / 2, rel=1e-12)
    assert rows["fuse[1]"].metrics["tpot_p50"].value == pytest.approx(1 / 1.5, rel=1e-12)
    assert rows["all"].metrics["tpot_p50"].value == pytest.approx(1 / 3, rel=1e-12)
    assert rows["rtn[0]"].metrics["tokens_per_s"].value == pytest.approx(2, rel=1e-12)
    assert result.interaction[f"tpot_p50 @ {LOAD}"].value == pytest.approx(1, rel=1e-12)
    assert not rows["rtn[0]"].kl_difference


def test_saturating_gains_interact_by_hand(world):
    # Each alone: 10 / 20. Both off only 20 ms, not 40: (10 / 20) / (1/2 * 1/2) = 2.
    world.slower, world.together = {"rtn": 2.0, "fuse": 2.0}, 20.0
    result = attribute(world.recipe("rtn", "fuse"), CONFIG, world.around())
    found = result.interaction[f"tpot_p50 @ {LOAD}"]
    assert found.value == pytest.approx(2, rel=1e-12)
    assert (found.excludes_one, found.pairs) == (True, 3)


def test_a_drifting_machine_shows_no_difference_where_there_is_none(world):
    world.drift = 1.01
    result = attribute(world.recipe("rtn", "fuse"), CONFIG, world.around())
    effect = by_factor(result)["rtn[0]"].metrics["tpot_p50"]
    assert effect.value == pytest.approx(1, rel=1e-12)
    assert effect.cell().startswith("no difference seen") or effect.high - effect.low < 1e-9, "rounding of a float"


def test_what_the_load_cannot_show_is_not_measured_and_says_why(world):
    result = attribute(world.recipe("fuse"), CONFIG, world.around())
    rows = by_factor(result)
    assert "one client" in rows["inflight_batching"].na
    assert "nothing is cut" in rows["chunked_prefill"].na
    assert "fills no block" in rows["prefix_cache"].na
    assert all(switches.inflight_batching for _, switches, _ in world.blocks), "nor is it switched off with the others"


def test_runtime_features_are_switched_on_one_plan(world):
    world.slower = {"inflight_batching": 1.25}
    config = AttributeConfig(
        mode="leave-one-out", pairs=3, concurrencies=(1, 8), prompt_tokens=32, output_tokens=4, windows=0
    )
    result = attribute(world.recipe("fuse"), config, world.around())
    row = by_factor(result)["inflight_batching"]
    assert row.metrics["tpot_p50"].value == pytest.approx(1 / 1.25, rel=1e-12)
    assert (row.workload, row.plan_bytes) == ("32+4±50% tokens, concurrency 8", None)
    assert sorted(set(world.builds)) == ["tiny", "tiny--without-fuse-0"]
    # Under 8 even answers it is switched off with the others, but was not measured alone.
    shape = "32+4 tokens, concurrency 8"
    assert any(shape in note and "load of its own: inflight_batching, prefix_cache" in note for note in result.method)


def test_cumulative_steps_multiply_to_the_whole_gain(world):
    world.slower, world.together = {"rtn": 2.0, "fuse": 2.0}, 20.0
    config = AttributeConfig(mode="both", pairs=3, concurrencies=(1,), prompt_tokens=8, output_tokens=4, windows=0)
    result = attribute(world.recipe("rtn", "fuse"), config, world.around())
    steps = by_factor(result, "cumulative")
    # Bare 20 ms, with rtn 20 ms (fuse still off), whole 10 ms.
    assert steps["rtn[0]"].metrics["tpot_p50"].value == pytest.approx(1, rel=1e-12)
    assert steps["fuse[1]"].metrics["tpot_p50"].value == pytest.approx(1 / 2, rel=1e-12)
    assert result.base["loads"][LOAD]["tpot_p50_ms"] == pytest.approx(10, rel=1e-12)
    # The last step is the same comparison as leaving fuse out: 3 loo + 1 more, 12 blocks each.
    assert len(world.blocks) == 4 * 12


def test_kl_is_paired_by_window(world, quality):
    plans = {
        "tiny": (0.1, 0.3, 0.2),
        "tiny--without-rtn-0": (0.0, 0.1, 0.05),
        "tiny--without-fuse-1": (0.1, 0.3, 0.2),
        "tiny--without-rtn-0-fuse-1": (0.0, 0.1, 0.05),
    }
    result = attribute(
        world.recipe("rtn", "fuse"),
        AttributeConfig(**{**_fields(CONFIG), "windows": 3, "length": 8}),
        world.around(quality=quality(plans)),
    )
    row = by_factor(result)["rtn[0]"]
    # Differences 0.1, 0.2, 0.15: mean 0.15, deviation 0.05, t(2) = 4.303: 0.15 ± 4.303 * 0.05 / sqrt(3).
    half = 4.303 * 0.05 / math.sqrt(3)
    assert row.kl == pytest.approx((0.2, 0.05))
    assert row.kl_difference.value == pytest.approx(0.15)
    assert (row.kl_difference.low, row.kl_difference.high) == pytest.approx((0.15 - half, 0.15 + half))
    assert str(by_factor(result)["fuse[1]"].kl_difference) == "exactly the same (n=3)"


def test_a_variant_that_cannot_be_built_is_a_row_with_the_error(world):
    world.unbuildable = ("tiny--without-fuse-1",)
    result = attribute(world.recipe("rtn", "fuse"), CONFIG, world.around())
    assert by_factor(result)["fuse[1]"].na == "cannot be built: node 3 has no kernel"
    assert by_factor(result)["rtn[0]"].na is None
    assert any("the interaction holds what was not measured alone: fuse[1]" in note for note in result.method)


def test_the_recipe_itself_must_be_built(world):
    world.unbuildable = ("tiny",)
    with pytest.raises(LoweringError):
        attribute(world.recipe("rtn", "fuse"), CONFIG, world.around())


def test_a_refusal_by_the_compiler_is_told_with_its_faults(world):
    def build(variant):
        if variant.overrides:
            raise ConfigError("recipe", [Fault("passes[0]", "bits are needed"), Fault("", "and more")])
        return world.build(variant)

    result = attribute(world.recipe("rtn", "fuse"), CONFIG, world.around(build=build))
    assert by_factor(result)["rtn[0]"].na == "cannot be built: passes[0]: bits are needed; and more"


def test_a_full_disk_is_no_finding_about_a_variant(world):
    def build(variant):
        if variant.overrides:
            raise StorageError("no room")
        return world.build(variant)

    with pytest.raises(StorageError):
        attribute(world.recipe("rtn", "fuse"), CONFIG, world.around(build=build))


@pytest.mark.parametrize("budget_s", [None, 10_000.0])
@pytest.mark.parametrize("mode", ["leave-one-out", "cumulative"])
def test_a_variant_that_cannot_be_opened_is_a_row_with_the_error(world, mode, budget_s):
    # The recipe without rtn is the first side that a budget would time, one upon the other.
    world.unopenable = ("tiny--without-fuse-1", "tiny--without-rtn-0-fuse-1")
    config = AttributeConfig(**{**_fields(CONFIG), "mode": mode, "budget_s": budget_s})
    rows = {row.factor: row for row in attribute(world.recipe("rtn", "fuse"), config, world.around()).rows}
    assert rows["fuse[1]"].na == "--max-seqs: exceeds the plan's"
    assert (rows["rtn[0]"].na is None) == (mode == "leave-one-out"), "one upon the other, rtn stands on the bare recipe"
    assert world.open_now == []


def test_a_budget_ends_well_where_nothing_can_be_opened(world):
    world.unopenable = ("tiny",)
    config = AttributeConfig(**{**_fields(CONFIG), "budget_s": 10_000.0})
    rows = attribute(world.recipe("rtn", "fuse"), config, world.around()).rows
    assert {row.na for row in rows if row.kind in ("pass", "all")} == {"--max-seqs: exceeds the plan's"}


def test_a_variant_whose_quality_cannot_be_taken_keeps_its_latency(world, quality):
    windows = quality(
        {"tiny": (0.1, 0.2), "tiny--without-rtn-0-fuse-1": (0.0, 0.0), "tiny--without-fuse-1": (0.1, 0.1)}
    )

    def measure(subject):
        if subject.name == "tiny--without-rtn-0":
            raise MeasureError("window 0: not finite")
        return windows(subject)

    config = AttributeConfig(**{**_fields(CONFIG), "windows": 2, "length": 8})
    result = attribute(world.recipe("rtn", "fuse"), config, world.around(quality=measure))
    row = by_factor(result)["rtn[0]"]
    assert (row.na, row.kl, row.kl_difference) == (None, None, None)
    assert by_factor(result)["fuse[1]"].kl is not None
    assert "KL not measured of tiny--without-rtn-0: window 0: not finite" in result.method


def test_the_quality_of_the_recipe_itself_must_be_taken(world):
    def measure(subject):
        raise MeasureError("not finite")

    config = AttributeConfig(**{**_fields(CONFIG), "windows": 2, "length": 8})
    with pytest.raises(MeasureError, match="not finite"):
        attribute(world.recipe("fuse"), config, world.around(quality=measure))


def test_no_engine_is_opened_for_the_quality_of_a_plan_that_does_not_fit(world):
    def measure(subject):
        raise AssertionError("not opened")

    world.free_bytes = 1 << 20
    config = AttributeConfig(**{**_fields(CONFIG), "windows": 2, "length": 8})
    result = attribute(world.recipe("fuse"), config, world.around(quality=measure))
    assert any("KL not measured of tiny: tiny needs" in note for note in result.method)


def test_failed_requests_make_no_figures(world):
    world.failing = ("tiny--without-rtn-0",)
    result = attribute(world.recipe("rtn", "fuse"), CONFIG, world.around())
    assert by_factor(result)["rtn[0]"].na == "1 of 8 requests failed without it: HTTP 503"
    assert any("no interaction" in note and "rtn[0]" in note for note in result.method)


def test_both_engines_stay_open_where_memory_allows_and_none_is_left_open(world):
    attribute(world.recipe("fuse"), CONFIG, world.around())
    assert (world.most_open, world.open_now) == (2, [])


def test_engines_are_opened_in_turn_where_memory_is_short(world):
    # A plan of some kilobytes and a pool of 1 MiB: 1.5 MiB free is room for one engine, not for two within 60%.
    world.free_bytes = 3 << 19
    attribute(world.recipe("fuse"), CONFIG, world.around())
    assert (world.most_open, world.open_now) == (1, [])


def test_a_plan_that_does_not_fit_in_memory_is_told_with_numbers(world):
    world.free_bytes = 1 << 20
    result = attribute(world.recipe("fuse"), CONFIG, world.around())
    assert "1 MiB are free" in by_factor(result)["fuse[0]"].na
    assert world.blocks == []


def test_a_killed_run_measures_only_the_rest(world):
    world.slower, world.die_after = {"rtn": 2.0}, 17
    file = world.recipe("rtn", "fuse")
    with pytest.raises(KeyboardInterrupt):
        attribute(file, CONFIG, world.around())
    assert (len(world.blocks), world.open_now) == (17, [])
    world.die_after = None
    result = attribute(file, CONFIG, world.around())
    # Two factors and all of them together, 3 pairs of 4 blocks each.
    assert len(world.blocks) == 3 * 12
    assert by_factor(result)["rtn[0]"].metrics["tpot_p50"].value == pytest.approx(0.5, rel=1e-12)
    attribute(file, CONFIG, world.around(), fresh=True)
    assert len(world.blocks) == 2 * 3 * 12, "--fresh measures again"


def test_a_short_budget_cuts_and_says_so(world):
    # Blocks of 10 s; two factors and all: 3 comparisons, the first block of 10 s measured before the decision.
    # 250 s - 10 s = 240 s = 2 comparisons of 12 blocks.
    config = AttributeConfig(**{**_fields(CONFIG), "budget_s": 250.0, "pairs": 4})
    result = attribute(world.recipe("rtn", "fuse"), config, world.around())
    rows = by_factor(result)
    assert rows["all"].na == "not measured (budget)"
    assert rows["fuse[1]"].metrics["tpot_p50"].pairs == 3
    assert "budget: 3 pairs instead of 4" in result.method
    assert "budget: 1 of 3 comparisons are not measured, from the end" in result.method
    assert len(world.blocks) == 24
    again = attribute(world.recipe("rtn", "fuse"), config, world.around())
    assert (again.to_json(), len(world.blocks)) == (result.to_json(), 24), "resumed, it decides the same"


def growing(world, block_s):
    """Blocks of 10 s at first, of `block_s` from the second on."""

    def bench(engine, workload, progress):
        world.block_s = block_s if world.blocks else 10.0
        return world.bench(engine, workload, progress)

    return bench


def test_a_run_that_takes_longer_than_foreseen_stops_at_its_budget(world):
    config = AttributeConfig(**{**_fields(CONFIG), "budget_s": 400.0})
    result = attribute(world.recipe("rtn", "fuse"), config, world.around(bench=growing(world, 40.0)))
    # The first comparison ends at 10 + 11 * 40 = 450 s.
    assert [row.na for row in result.rows if row.factor in ("fuse[1]", "all")] == ["not measured (budget)"] * 2


def test_a_comparison_that_would_not_end_within_the_budget_is_not_begun(world):
    config = AttributeConfig(**{**_fields(CONFIG), "budget_s": 400.0})
    result = attribute(world.recipe("rtn", "fuse"), config, world.around(bench=growing(world, 15.0)))
    # Two comparisons end at 10 + 23 * 15 = 355 s; the third would take as long as the second, 180 s.
    assert [row.factor for row in result.rows if row.na == "not measured (budget)"] == ["all"]
    assert len(world.blocks) == 24


def test_lengths_beyond_the_recipe_are_found_before_any_build(world):
    config = AttributeConfig(prompt_tokens=500, output_tokens=64, windows=0)
    with pytest.raises(ConfigError, match="564 tokens exceed the recipe's limits.max_seq_len 512"):
        attribute(world.recipe("fuse"), config, world.around())
    assert world.builds == []


def test_options_are_checked_all_at_once():
    with pytest.raises(ConfigError) as caught:
        AttributeConfig(mode="all", pairs=2, concurrencies=(8, 1), knee=True)
    assert [fault.where for fault in caught.value.faults] == ["mode", "pairs", "concurrencies", "knee"]


def test_knees_are_compared_by_their_brackets(world):
    def ladder(engine, workload, attain):
        assert (workload.slo, attain) == (Slo(ttft_ms=500), 0.95)
        held = 4.0 if engine.plan == "tiny" else 2.0
        return {"knee": {"rate_per_s": held, "fails_at_per_s": held * 1.1}}

    config = AttributeConfig(**{**_fields(CONFIG), "knee": True, "slo": Slo(ttft_ms=500)})
    result = attribute(world.recipe("fuse"), config, world.around(ladder=ladder))
    effect = next(row.metrics["knee"] for row in result.rows if row.factor == "fuse[0]" and "knee" in row.metrics)
    # 4 / 2, at least 4 / 2.2, at most 4.4 / 2.
    assert (effect.value, effect.low, effect.high) == pytest.approx((2, 4 / 2.2, 2.2))
    assert effect.method == "bracket"


def test_a_ladder_that_fails_costs_its_knee_only(world):
    def ladder(engine, _workload, _attain):
        raise ConfigError("benchmark options", [Fault("rate_per_s", "must be at least 0.000001, got 0.0")])

    config = AttributeConfig(**{**_fields(CONFIG), "knee": True, "slo": Slo(ttft_ms=500)})
    result = attribute(world.recipe("fuse"), config, world.around(ladder=ladder))
    rows = {row.workload: row for row in result.rows if row.factor == "fuse[0]"}
    assert rows["8+4 tokens, ladder"].na == "rate_per_s: must be at least 0.000001, got 0.0"
    assert rows[LOAD].metrics["tpot_p50"] is not None


def test_speculation_is_checked_before_any_build(world):
    with pytest.raises(ConfigError, match="speculation: must be auto, medusa"):
        AttributeConfig(speculation="magic")
    config = AttributeConfig(**{**_fields(CONFIG), "speculation": "medusa"})
    with pytest.raises(ConfigError, match="--speculation: medusa needs heads"):
        attribute(world.recipe("fuse"), config, world.around())
    assert world.builds == []


@pytest.mark.parametrize(
    "figures", [{"value": math.nan}, {"value": 0.0}, {"low": -1.0}, {"value": None}, {"value": "1"}]
)
def test_an_effect_that_no_chart_can_place_is_refused(figures):
    good = {"value": 2.0, "low": 1.5, "high": 2.5, "pairs": 3}
    assert Effect.from_json(good).value == 2
    with pytest.raises((ValueError, TypeError)):
        Effect.from_json({**good, **figures})


def test_json_gives_everything_back_and_the_table_names_every_factor(world):
    world.slower = {"rtn": 2.0}
    config = AttributeConfig(**{**_fields(CONFIG), "mode": "both"})
    result = attribute(world.recipe("rtn", "fuse"), config, world.around())
    assert Attribution.from_json(json.loads(json.dumps(result.to_json()))) == result
    console = Console(width=80)
    with console.capture() as capture:
        console.print(result.table())
    shown = capture.get()
    for said in ("rtn[0]", "fuse[1]", "no difference seen", "×0.5", "n = 3 pairs", "prefix_cache", "95% t-interval"):
        assert said in shown


def _fields(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
