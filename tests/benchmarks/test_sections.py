"""What sections measure and in which order, with engines that only take notes."""

import os

import pytest
from peer import sections, starters
from peer.machine_probe import MachineState
from peer.names import (
    CONCURRENT,
    DECODE,
    LLAMA_SERVER,
    LOADED,
    OPENVINO,
    OPTIMC,
    OPTIMC_BF16,
    OPTIMC_SERVE,
    ORT_GENAI,
    READY,
    RESIDENT,
)
from peer.places import RECIPES, Peers, Plans
from peer.sections import FIRST, SIXTEEN, Bench
from peer.targets import judge


@pytest.fixture
def log(monkeypatch):
    """What every engine was asked, as (engine, what)."""
    entries: list[tuple[str, object]] = []

    class Noting:
        command = ("/somewhere/engine",)
        pid = os.getpid()
        ready_s = 0.25

        def __init__(self, name: str) -> None:
            self.name = name
            self.server = self
            entries.append((name, "starts"))

        def measure(self, workload, seed):
            entries.append((self.name, workload))
            return 100.0 + seed

        def burst(self, workload, seed):
            entries.append((self.name, workload))

        def close(self):
            entries.append((self.name, "ends"))

    def noting(name):
        return lambda *_paths, **_options: Noting(name)

    for module, attribute, name in (
        (sections, "optimc_engine", OPTIMC),
        (sections, "OptimcServer", OPTIMC_SERVE),
        (starters, "LlamaBench", "llama-bench"),
        (starters, "LlamaServer", LLAMA_SERVER),
        (starters, "openvino_engine", OPENVINO),
        (starters, "ort_genai_engine", ORT_GENAI),
    ):
        monkeypatch.setattr(module, attribute, noting(name))
    return entries


@pytest.fixture
def bench(tmp_path):
    """Two rounds, all plans built, no peer set up."""
    plan = tmp_path / "a.plan"
    plan.write_bytes(b"plan")
    plans = Plans(tmp_path, dict.fromkeys(RECIPES, plan))
    return Bench(Peers(tmp_path), plans, lambda: MachineState(35, 40), rounds=2)


def set_up_ort_genai(bench):
    for path in (bench.peers.python, bench.peers.ort_genai_model("smollm2")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_without_any_peer_ours_is_measured_and_the_targets_that_need_one_are_not(log, bench):
    samples = sections.decode(bench)
    assert samples.values == {DECODE: {OPTIMC: [101, 102]}}
    assert [note for note in samples.notes if "not set up" in note] == [
        "llama.cpp: not set up (llama.cpp/build/bin/llama-bench, models/smollm2-q4_0.gguf missing)",
        "OpenVINO: not set up (run/bin/python, models/smollm2-ov missing)",
        "onnxruntime-genai: not set up (run/bin/python, models/smollm2-ort missing)",
    ]
    assert {verdict.outcome for verdict in judge({"decode": samples})} == {"not measured"}
    assert log[-1] == (OPTIMC, "ends")


@pytest.mark.parametrize("name", ["decode", "prefill", "context"])
def test_a_peer_that_is_set_up_takes_its_turn_in_each_metric(log, bench, name):
    set_up_ort_genai(bench)
    samples = sections.SECTIONS[name](bench)
    assert [list(by_engine) for by_engine in samples.values.values()] == [[OPTIMC, ORT_GENAI]] * len(samples.values)
    assert not any("onnxruntime-genai" in note for note in samples.notes)
    assert samples.commands == {OPTIMC: "engine", ORT_GENAI: "engine"}


def test_sixteen_requests_are_answered_in_process_and_by_servers(log, bench):
    set_up_ort_genai(bench)
    samples = sections.concurrent(bench)
    assert list(samples.values[CONCURRENT]) == [OPTIMC, ORT_GENAI, OPTIMC_SERVE, OPTIMC_BF16]
    assert {what for _, what in log} == {"starts", SIXTEEN, "ends"}


def test_serve_needs_no_peer(log, bench):
    samples = sections.serve(bench)
    assert samples.values[READY] == {OPTIMC: [0.25, 0.25]}
    assert [note.split(":")[0] for note in samples.notes[1:]] == [LLAMA_SERVER]


def test_footprint_starts_one_process_after_another_and_the_first_round_does_not_count(log, bench):
    set_up_ort_genai(bench)
    samples = sections.footprint(bench)
    turn = [
        (name, what)
        for name in (OPTIMC, ORT_GENAI)
        for workload in (FIRST, SIXTEEN)
        for what in ("starts", workload, "ends")
    ]
    assert log == turn * 3
    assert {engine: len(values) for engine, values in samples.values[LOADED].items()} == {OPTIMC: 2, ORT_GENAI: 2}
    assert all(value > 1 for values in samples.values[RESIDENT].values() for value in values), "megabytes"
    assert len(samples.states) == 3


def test_the_first_answer_is_one_token_and_the_burst_is_sixteen_requests():
    assert (FIRST.prompt_tokens, FIRST.output_tokens, FIRST.requests) == (8, 1, 1)
    assert (SIXTEEN.prompt_tokens, SIXTEEN.output_tokens, SIXTEEN.requests) == (128, 128, 16)
