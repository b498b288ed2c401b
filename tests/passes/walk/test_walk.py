"""A walk shows a pass what each layer's linears read, with the weights the stream promises."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from optimc.plan import LayerReport
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.calibrate import Calibration
from optimc_passes.quantize.linears import LinearWeight
from optimc_passes.walk.activations import Activations
from optimc_passes.walk.layered_model import Stage
from optimc_passes.walk.loaded_layer import LoadedLayer
from optimc_passes.walk.walk import Finished, LayerWork, Streams, walk_layers
from optimc_passes.weights import Dense

ROWS = tuple(np.random.default_rng(3).integers(0, 96, length).astype(np.int32) for length in (21, 5, 21))
TOLERANCE = 1e-5


def start(family: Any) -> Artifact:
    return Artifact.start(family.checkpoint, Calibration(ROWS, "c" * 64, sum(map(len, ROWS)), "random"))


class Watching(LayerWork):
    """Keeps what it is shown; rounds every linear weight coarsely as soon as it has seen its input."""

    stream: ClassVar[Streams] = "quantized"

    def __init__(self, step: float) -> None:
        self.step = step
        self.seen: dict[str, list[NDArray[np.float32]]] = {}
        self.original: dict[str, list[NDArray[np.float32]]] = {}
        self.changed: dict[str, Dense] = {}

    def stage(self, layer: LoadedLayer, stage: Stage, inputs: Activations, original: Activations | None) -> None:
        for linear in stage.linears:
            self.seen[linear.layer] = [inputs.window(index).copy() for index in range(3)]
            if original is not None:
                self.original[linear.layer] = [original.window(index).copy() for index in range(3)]
            rounded = np.rint(layer.weight(linear.name) / self.step) * np.float32(self.step)
            layer.set_weight(linear.name, rounded)
            self.changed[linear.name] = Dense.of(rounded)

    def end(self, layer: LoadedLayer) -> Finished:
        names = [name for name in self.changed if name.startswith(layer.prefix)]
        return Finished({name: self.changed[name] for name in names}, (LayerReport(layer=layer.prefix),))

    def head(self, linear: LinearWeight, weight: NDArray[np.float32], inputs: Activations) -> Finished:
        self.seen[linear.layer] = [inputs.window(index).copy() for index in range(3)]
        return Finished({linear.name: Dense.of(weight * 2)}, (LayerReport(layer=linear.layer),))


class WatchingOriginal(Watching):
    stream: ClassVar[Streams] = "original"


class WatchingBoth(Watching):
    stream: ClassVar[Streams] = "both"


def linear_inputs(model: torch.nn.Module) -> dict[str, list[NDArray[np.float32]]]:
    """Return what each linear layer of a whole model reads for each window."""
    seen: dict[str, list[NDArray[np.float32]]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _m, args, name=name: seen.setdefault(name, []).append(args[0].flatten(0, -2).numpy())
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad():
        for ids in ROWS:
            model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def assert_close(seen: dict[str, list[NDArray[np.float32]]], expected: dict[str, list[NDArray[np.float32]]]) -> None:
    assert seen.keys() == expected.keys()
    for name, windows in seen.items():
        for actual, wanted in zip(windows, expected[name], strict=True):
            assert np.abs(actual - wanted).max() <= TOLERANCE * np.abs(wanted).max(), name


@pytest.fixture
def llama(make_family: Callable[..., Any]) -> Any:
    return make_family("llama")


def rounded_model(family: Any, changed: dict[str, Dense]) -> torch.nn.Module:
    """Return transformers' model with the weights a walk ended with."""
    import copy

    model = copy.deepcopy(family.model)
    with torch.no_grad():
        for name, weight in changed.items():
            model.get_parameter(name).copy_(torch.from_numpy(weight.read()))
    return model


def test_a_sequential_walk_sees_the_outputs_of_rounded_layers(family: Any):
    work = Watching(0.05)
    walked = walk_layers(start(family), work, PassContext(), wants_head=True)
    head = walked.weights.pop("lm_head.weight")
    assert_close(work.seen, linear_inputs(rounded_model(family, work.changed)))
    assert np.array_equal(head.read(), 2 * family.model.lm_head.weight.detach().numpy())
    assert set(walked.weights) == set(work.changed)
    assert [row.layer for row in walked.rows] == ["model.layers.0.", "model.layers.1.", "lm_head"]
    assert walked.resumed_at is None


def test_an_original_walk_sees_the_checkpoint_whatever_is_set(llama: Any):
    work = WatchingOriginal(0.05)
    walk_layers(start(llama), work, PassContext())
    expected = linear_inputs(llama.model)
    del expected["lm_head"]
    assert_close(work.seen, expected)


def test_a_walk_in_both_streams_sees_both(llama: Any):
    work = WatchingBoth(0.05)
    walk_layers(start(llama), work, PassContext())
    original, rounded = linear_inputs(llama.model), linear_inputs(rounded_model(llama, work.changed))
    del original["lm_head"], rounded["lm_head"]
    assert_close(work.original, original)
    assert_close(work.seen, rounded)


def test_activations_in_files_change_nothing(llama: Any, tmp_path: Any):
    """Down to the last bit: a limit on memory must not show in a result."""
    free, tight = Watching(0.05), Watching(0.05)
    walk_layers(start(llama), free, PassContext())
    walk_layers(start(llama), tight, PassContext(scratch=tmp_path, max_host_bytes=1))
    for name, windows in free.seen.items():
        assert all(np.array_equal(a, b) for a, b in zip(windows, tight.seen[name], strict=True))
    assert list(tmp_path.iterdir()) == []


def test_finished_weights_are_handed_over_layer_by_layer(llama: Any):
    kept: list[str] = []
    labels: list[tuple[int, int, str]] = []

    def keep(name: str, weight: Any) -> Any:
        kept.append(name)
        return weight

    context = PassContext(keep=keep, progress=lambda done, total, label: labels.append((done, total, label)))
    walk_layers(start(llama), Watching(0.05), context)
    assert len(kept) == 14
    assert [name.startswith("model.layers.0.") for name in kept] == [True] * 7 + [False] * 7
    assert labels == [(0, 2, "model.layers.0"), (1, 2, "model.layers.1"), (2, 2, "")]


def test_activations_are_freed_at_once(llama: Any):
    """Without the help of a search for circles, which may be long in coming: between layers, one is alive."""
    alive: list[int] = []

    def progress(done: int, total: int, label: str) -> None:
        alive.append(sum(type(thing) is Activations for thing in gc.get_objects()))

    gc.collect()
    gc.disable()
    try:
        walk_layers(start(llama), Watching(0.05), PassContext(progress=progress))
    finally:
        gc.enable()
    assert alive == [1, 1, 1]


def cut_short(family: Any, layer: int, partial: Path, work: LayerWork | None = None) -> None:
    """Walk until the layer begins, then stop as Ctrl-C does."""

    def progress(done: int, total: int, label: str) -> None:
        if done == layer:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        walk_layers(start(family), work or Watching(0.05), PassContext(partial=partial, progress=progress))


@pytest.mark.parametrize("work_type", [Watching, WatchingBoth])
def test_a_walk_that_was_cut_short_ends_with_the_same_bits(llama: Any, tmp_path: Path, work_type: type[Watching]):
    undisturbed, resumed = work_type(0.05), work_type(0.05)
    expected = walk_layers(start(llama), undisturbed, PassContext())
    cut_short(llama, 1, tmp_path / "partial", work_type(0.05))
    kept: list[str] = []

    def keep(name: str, weight: Any) -> Any:
        kept.append(name)
        return weight

    walked = walk_layers(start(llama), resumed, PassContext(partial=tmp_path / "partial", keep=keep))
    assert walked.resumed_at == 1
    assert [row.layer for row in walked.rows] == ["model.layers.0.", "model.layers.1."]
    assert sorted(kept) == sorted(expected.weights) == sorted(walked.weights)
    assert all(np.array_equal(weight.read(), expected.weights[name].read()) for name, weight in walked.weights.items())
    # Layer 0 was not run again, and layer 1 saw what it would have seen.
    assert all(name.startswith("model.layers.1.") for name in resumed.seen)
    for name, windows in resumed.seen.items():
        assert all(np.array_equal(a, b) for a, b in zip(windows, undisturbed.seen[name], strict=True))


def test_a_walk_with_a_harmed_past_starts_over(llama: Any, tmp_path: Path):
    cut_short(llama, 1, tmp_path / "partial")
    (stream,) = (tmp_path / "partial").glob("stream-*")
    stream.write_bytes(stream.read_bytes()[:-4])
    work = Watching(0.05)
    assert walk_layers(start(llama), work, PassContext(partial=tmp_path / "partial")).resumed_at is None
    assert len(work.seen) == 14
