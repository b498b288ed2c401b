"""Ctrl-C while an engine is built ends the build, whatever Python was doing."""

import os
import signal
import threading

import onnx
import onnx_ir as ir
import pytest

from optimc.errors import LoweringError
from optimc_passes.emit.tensorrt.flavor import RTX
from optimc_passes.emit.tensorrt.interruption import holding_interrupts, monitor_class
from optimc_passes.emit.tensorrt.network import BuilderOptions, build_engine
from optimc_passes.emit.tensorrt.profiles import model_profiles

PROFILES = model_profiles(max_seqs=4, max_step_tokens=32, max_seq_len=64)
GRAPH = '<ir_version: 10, opset_import: ["" : 23]> g (float[T, 8] x) => (float[T, 8] y) { y = Relu(x) }'


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_what_was_held_back_is_raised_when_the_block_ends():
    steps = []

    def block():
        with holding_interrupts() as interrupted:
            steps.append(interrupted())
            press()
            steps.append(interrupted())

    with pytest.raises(KeyboardInterrupt):
        block()
    assert steps == [False, True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_comes_before_an_error_it_has_caused():
    def fail(*, pressed):
        with holding_interrupts():
            if pressed:
                press()
            raise LoweringError("canceled, or another reason")

    with pytest.raises(KeyboardInterrupt):
        fail(pressed=True)
    with pytest.raises(LoweringError):
        fail(pressed=False)


def test_what_is_taken_care_of_elsewhere_is_left_alone():
    caught = []
    before = signal.signal(signal.SIGINT, lambda *_: caught.append(1))
    try:
        with holding_interrupts() as interrupted:
            press()
            assert not interrupted()
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught == [1]

    def elsewhere():
        with holding_interrupts() as interrupted:
            caught.append(interrupted())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert caught == [1, False]


def test_a_build_is_given_up_and_leaves_nothing(tmp_path, monkeypatch):
    trt = pytest.importorskip("tensorrt_rtx")
    phases, steps = [], []
    monitor = monitor_class(trt)
    go_on = monitor.step_complete

    def begin(self, name, parent, num_steps):
        if not phases:
            press()
        phases.append(name)

    def step(self, name, number):
        steps.append(go_on(self, name, number))
        return steps[-1]

    monkeypatch.setattr(monitor, "phase_start", begin)
    monkeypatch.setattr(monitor, "step_complete", step)
    model = ir.from_proto(onnx.parser.parse_model(GRAPH))
    with pytest.raises(KeyboardInterrupt):
        build_engine(model, PROFILES, BuilderOptions(RTX, ("sm_89",), 3, tmp_path, None), trt)
    assert steps == [False], "it ends with the step that was under way"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert build_engine(model, PROFILES, BuilderOptions(RTX, ("sm_89",), 3, tmp_path, None), trt).nbytes > 0
