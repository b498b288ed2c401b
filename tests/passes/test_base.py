from typing import ClassVar

import numpy as np
import pytest
from pydantic import ValidationError

from optimc.errors import CheckpointError, PassError, VerifyError
from optimc_passes.artifact import Artifact
from optimc_passes.base import Pass, PassConfig, PassContext, PassResult
from optimc_passes.calibrate import Calibration
from optimc_passes.graph.attach import attach_weights
from optimc_passes.weights import Dense, WeightStore

NORM = "model.norm.weight"


class ScaleConfig(PassConfig):
    factor: float = 2.0
    """What to multiply by."""


class Scale(Pass[ScaleConfig]):
    """Multiplies the final norm; stands for any weight pass."""

    name = "scale"
    version = 1
    stage = "weights"
    config_type = ScaleConfig

    def run(self, artifact, context):
        weight = artifact.weights[NORM].read() * np.float32(self.config.factor)
        changed = {NORM: context.keep(NORM, Dense.of(weight))}
        return PassResult(
            artifact.evolve(weights=artifact.weights.replace(changed)), {"n": 1}, ("doubled: it was asked",)
        )


class Rename(Pass[PassConfig]):
    """Renames every node; stands for any graph pass."""

    name = "rename"
    version = 1
    stage = "graph"
    config_type = PassConfig

    def run(self, artifact, context):
        for node in artifact.graph.graph:
            node.name = "renamed"
        return PassResult(artifact)


@pytest.fixture
def artifact(tiny_decoder):
    return Artifact.start(tiny_decoder(layers=1).checkpoint())


@pytest.fixture
def attached(artifact, tiny_decoder):
    return artifact.evolve(graph=attach_weights(tiny_decoder(layers=1).model, artifact.weights))


def test_a_pass_returns_another_artifact_and_a_report(artifact):
    outcome = Scale(ScaleConfig(factor=3))(artifact)
    assert np.array_equal(outcome.artifact.weights[NORM].read(), artifact.weights[NORM].read() * 3)
    report = outcome.report
    assert (report.name, report.version, report.config) == ("scale", 1, {"factor": 3.0})
    assert (report.metrics, report.decisions, report.cached) == ({"n": 1}, ("doubled: it was asked",), False)
    assert report.seconds > 0


def test_the_key_depends_on_input_pass_version_and_config(artifact):
    class Newer(Scale):
        version = 2

    class Other(Scale):
        name = "other"

    keys = {
        Scale(ScaleConfig())(artifact).artifact.key,
        Scale(ScaleConfig(factor=3))(artifact).artifact.key,
        Newer(ScaleConfig())(artifact).artifact.key,
        Other(ScaleConfig())(artifact).artifact.key,
        Scale(ScaleConfig())(artifact.evolve(key="e" * 64)).artifact.key,
        artifact.key,
    }
    assert len(keys) == 6
    # A default that is written out is the same configuration.
    assert Scale(ScaleConfig(factor=2.0)).result_key(artifact) == Scale(ScaleConfig()).result_key(artifact)


def test_calibration_is_part_of_the_key_only_where_it_is_used(artifact):
    class Calibrated(Scale):
        uses_calibration = True

    calibrated = artifact.evolve(calibration=Calibration((), "c" * 64, 0, "none"))
    recalibrated = artifact.evolve(calibration=Calibration((), "f" * 64, 0, "none"))
    assert Scale(ScaleConfig()).result_key(calibrated) == Scale(ScaleConfig()).result_key(recalibrated)
    assert Calibrated(ScaleConfig()).result_key(calibrated) != Calibrated(ScaleConfig()).result_key(recalibrated)
    with pytest.raises(PassError, match="needs calibration text"):
        Calibrated(ScaleConfig())(artifact)


def test_a_requirement_stops_the_pass_before_it_runs(artifact):
    class Picky(Scale):
        problems: ClassVar[list[str]] = ["too small; use more"]

        def requires(self, artifact):
            return self.problems

        def run(self, artifact, context):
            raise AssertionError("it ran")

    with pytest.raises(PassError, match=r"^scale failed after \[load, awq\]: too small; use more$"):
        Picky(ScaleConfig())(artifact, PassContext(done=("load", "awq")))
    Picky.problems = ["one", "two"]
    with pytest.raises(PassError, match="2 problems\n  one\n  two$"):
        Picky(ScaleConfig())(artifact)


def test_a_promise_that_is_not_kept_fails_the_pass(artifact):
    class Broken(Scale):
        def ensures(self, before, after):
            assert before.key != after.key
            return ["weights are still dense"]

    with pytest.raises(PassError, match="scale failed after .*: weights are still dense"):
        Broken(ScaleConfig())(artifact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: {n: w for n, w in weights.items() if n != NORM}, "model.norm.weight is gone"),
        (lambda weights: {**weights, NORM: Dense.of(np.ones(3, np.float32))}, r"has shape \[3\], had \[32\]"),
    ],
)
def test_no_pass_may_lose_or_reshape_a_weight(artifact, change, message):
    class Careless(Scale):
        def run(self, artifact, context):
            return PassResult(artifact.evolve(weights=WeightStore(change(artifact.weights))))

    with pytest.raises(PassError, match=message):
        Careless(ScaleConfig())(artifact)


def test_a_users_error_inside_names_the_pass_and_a_bug_passes_through(artifact):
    class Failing(Scale):
        error: ClassVar[Exception] = CheckpointError("q_proj: damaged")

        def run(self, artifact, context):
            raise self.error

    with pytest.raises(PassError, match=r"scale failed after \[\]: q_proj: damaged"):
        Failing(ScaleConfig())(artifact)
    for error in (ZeroDivisionError(), VerifyError("inner", [], "wrong")):
        Failing.error = error
        with pytest.raises(type(error)) as caught:
            Failing(ScaleConfig())(artifact)
        assert caught.value is error


@pytest.mark.parametrize("error", [ZeroDivisionError("by\nzero"), SystemExit(3)])
@pytest.mark.parametrize("method", ["requires", "run", "ensures"])
def test_whatever_a_users_pass_raises_names_the_pass_and_the_line(artifact, error, method):
    class Failing(Scale):
        source_digest = "0" * 64

    def fail(*_):
        raise error

    setattr(Failing, method, fail)
    line = fail.__code__.co_firstlineno + 1
    place = f"{type(error).__name__}: {' '.join(str(error).split())} ({__file__}, line {line})"
    with pytest.raises(PassError) as caught:
        Failing(ScaleConfig())(artifact, PassContext(("load",)))
    assert str(caught.value) == f"scale failed after [load]: {place}"


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda artifact: None, "run returned NoneType, want a PassResult"),
        (lambda artifact: artifact, "run returned Artifact, want a PassResult"),
        (lambda artifact: PassResult(artifact.graph), "run returned Model as the artifact, want an Artifact"),
        (
            lambda artifact: PassResult(artifact.evolve(graph=None)),
            "run returned NoneType as the graph, want an ir.Model",
        ),
        (
            lambda artifact: PassResult(artifact.evolve(graph=artifact.graph.graph)),
            "run returned Graph as the graph, want an ir.Model",
        ),
        (
            lambda artifact: PassResult(artifact, {"a": object()}, ("fine", 3)),
            "its metrics.a cannot be reported: Input should be a valid string; "
            "its decisions.1 cannot be reported: Input should be a valid string",
        ),
        (
            lambda artifact: PassResult(artifact, fusion="x"),
            "its fusion cannot be reported: Input should be a valid dictionary or instance of FusionReport",
        ),
    ],
)
def test_a_result_that_is_none_says_what_was_wanted(attached, returned, said):
    class Odd(Rename):
        def run(self, artifact, context):
            return returned(artifact)

    with pytest.raises(PassError) as caught:
        Odd(PassConfig())(attached)
    assert str(caught.value) == f"rename failed after []: {said}"


@pytest.mark.parametrize("weights", [None, {}])
def test_weights_that_are_no_store_say_what_was_wanted(artifact, monkeypatch, weights):
    monkeypatch.setattr(Scale, "run", lambda _self, artifact, _context: PassResult(artifact.evolve(weights=weights)))
    with pytest.raises(PassError, match=f"run returned {type(weights).__name__} as weights, want a WeightStore"):
        Scale(ScaleConfig())(artifact)


@pytest.mark.parametrize("method", ["requires", "ensures"])
@pytest.mark.parametrize("returned", [None, "too small", [1]])
def test_conditions_are_lists_of_sentences(artifact, monkeypatch, method, returned):
    monkeypatch.setattr(Scale, method, lambda *_: returned)
    with pytest.raises(PassError) as caught:
        Scale(ScaleConfig())(artifact)
    assert str(caught.value) == f"scale failed after []: {method} returned {returned!r}, want a list of sentences"


def test_constants_that_the_copy_shares_cannot_be_written(attached):
    """Otherwise a pass changes the graph before it too, and nothing differs."""

    class Write(Rename):
        source_digest = "0" * 64

        def run(self, artifact, context):
            for value in artifact.graph.graph.initializers.values():
                value.const_value.numpy()[...] = 0
            return PassResult(artifact)

    before = {name: value.const_value.numpy().copy() for name, value in attached.graph.graph.initializers.items()}
    with pytest.raises(PassError, match="rename failed .* read-only"):
        Write(PassConfig())(attached)
    for name, value in attached.graph.graph.initializers.items():
        np.testing.assert_array_equal(value.const_value.numpy(), before[name])


def test_stages_are_kept_apart(artifact, attached):
    with pytest.raises(PassError, match="must come before the graph is attached"):
        Scale(ScaleConfig())(attached)
    with pytest.raises(PassError, match="there is none yet"):
        Rename(PassConfig())(artifact)


def test_a_graph_pass_rewrites_a_copy(attached):
    outcome = Rename(PassConfig())(attached)
    assert {node.name for node in outcome.artifact.graph.graph} == {"renamed"}
    assert "renamed" not in {node.name for node in attached.graph.graph}


def test_a_graph_pass_may_not_change_weights(attached):
    class Sneaky(Rename):
        def run(self, artifact, context):
            return PassResult(artifact.evolve(weights=WeightStore(artifact.weights)))

    with pytest.raises(PassError, match="a graph pass changed the weight store"):
        Sneaky(PassConfig())(attached)


def test_peak_memory_is_that_of_the_pass(artifact):
    class Greedy(Scale):
        def run(self, artifact, context):
            np.ones(64 << 20, np.uint8).sum()
            return super().run(artifact, context)

    peak = Greedy(ScaleConfig())(artifact).report.peak_bytes
    # Pages freed by earlier tests may serve a part of the 64 MiB.
    assert 48 << 20 < peak < 128 << 20
    assert Scale(ScaleConfig())(artifact).report.peak_bytes < 32 << 20


def test_configurations_are_frozen_and_know_their_keys():
    config = ScaleConfig()
    with pytest.raises(ValidationError):
        config.factor = 3
    with pytest.raises(ValidationError):
        ScaleConfig(faktor=3)
    assert ScaleConfig.model_fields["factor"].description == "What to multiply by."
