import pytest

from optimc.errors import CheckpointError
from optimc_passes.load.generation_defaults import read_generation_defaults


def read(notes=None, **generation):
    return read_generation_defaults(generation, [] if notes is None else notes)


def test_nothing_stated_is_nothing():
    assert read() == {}


def test_sampling_settings_that_differ_from_neutral():
    got = read(do_sample=True, temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05)
    assert got == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    assert isinstance(got["top_k"], int)


def test_neutral_values_are_left_out():
    assert read(do_sample=True, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0) == {}


def test_without_do_sample_sampling_settings_do_not_count_and_are_noted():
    notes: list[str] = []
    assert read(notes, temperature=0.6, top_p=0.9, repetition_penalty=1.2) == {"repetition_penalty": 1.2}
    assert notes == ["generation_config.json sets temperature, top_p but not do_sample: true, so they do not count"]


def test_explicit_do_sample_false_is_greedy():
    assert read(do_sample=False) == {"temperature": 0.0}


def test_settings_we_do_not_apply_are_noted():
    notes: list[str] = []
    read(notes, no_repeat_ngram_size=3, num_beams=4, typical_p=1.0, bad_words_ids=[], suppress_tokens=None)
    assert notes == ["generation_config.json sets no_repeat_ngram_size, num_beams, which are not applied"]


@pytest.mark.parametrize("value", ["hot", float("nan"), float("inf"), True])
def test_values_that_are_no_numbers_are_refused(value):
    with pytest.raises(CheckpointError, match="temperature must be a finite number"):
        read(do_sample=True, temperature=value)
