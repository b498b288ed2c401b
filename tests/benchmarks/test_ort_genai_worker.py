"""What the worker asks of onnxruntime-genai, whose part a stand-in of the same names plays."""

import json
import sys
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest


class Config:
    def __init__(self, model):
        self.model = model

    def overlay(self, text):
        self.changes = json.loads(text)


class Params:
    def __init__(self, model):
        self.model = model

    def set_search_options(self, **options):
        self.options = options


class Generator:
    """Ends an answer as soon as it may."""

    def __init__(self, _model, params):
        self.options = params.options

    def append_tokens(self, tokens):
        self.sequences = tokens.reshape(self.options["batch_size"], -1)

    def generate_next_token(self):
        assert not self.is_done()
        self.sequences = np.pad(self.sequences, ((0, 0), (0, 1)))

    def is_done(self):
        return self.sequences.shape[1] >= max(self.options["min_length"], 1)

    def get_sequence(self, number):
        return self.sequences[number]


@pytest.fixture
def engine(monkeypatch):
    package = ModuleType("onnxruntime_genai")
    package.__version__ = "0"
    package.Config, package.GeneratorParams, package.Generator = Config, Params, Generator
    package.Model = lambda config: config
    package.disable_telemetry_events = lambda: None
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", package)
    monkeypatch.delitem(sys.modules, "peer.ort_genai_worker", raising=False)
    return import_module("peer.ort_genai_worker").OrtGenaiEngine("folder", 3)


def test_threads_are_those_of_the_session(engine):
    assert engine._model.changes == {"model": {"decoder": {"session_options": {"intra_op_num_threads": 3}}}}


@pytest.mark.parametrize("requests", [1, 3])
def test_every_prompt_is_answered_with_all_its_tokens_whatever_the_model_says(engine, requests):
    prompts = [[number] * 8 for number in range(requests)]
    said = engine.answer({"ask": "burst", "prompts": prompts, "output_tokens": 5})["requests"]
    assert [each["tokens"] for each in said] == [5] * requests
    assert all(0 < each["first_s"] <= each["end_s"] for each in said)


def test_the_best_token_is_taken(engine, monkeypatch):
    asked = []
    monkeypatch.setattr(
        Params, "set_search_options", lambda self, **options: (asked.append(options), setattr(self, "options", options))
    )
    engine.answer({"ask": "burst", "prompts": [[1, 2], [3, 4]], "output_tokens": 3})
    assert asked == [{"batch_size": 2, "do_sample": False, "min_length": 5, "max_length": 5}]
