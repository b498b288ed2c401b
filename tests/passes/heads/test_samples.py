"""Sampled text on disk: what is finished survives, what is harmed does not count."""

from __future__ import annotations

import json

import numpy as np
import pytest

from optimc_passes.heads.samples import Sample, SampleStore
from optimc_passes.heads.split import split_samples

WIDTH = 4


def sample(first, length=3):
    tokens = np.arange(first, first + length)
    return Sample(tokens, np.repeat(tokens[:, None], WIDTH, axis=1).astype(np.float32))


@pytest.fixture
def store(tmp_path):
    store = SampleStore(tmp_path, WIDTH)
    store.append("chat", [sample(10), sample(20, 5)], [[7], [8]])
    store.append("prose", [sample(30)], [[9]])
    return store


def test_samples_come_back_as_they_went_in(store):
    samples = SampleStore(store.folder, WIDTH).open()
    assert samples.kinds == ("chat", "chat", "prose")
    assert samples.tokens[samples.rows(1)].tolist() == [20, 21, 22, 23, 24]
    assert samples.hidden[samples.rows(2)][:, 0].tolist() == [30, 31, 32]


def test_pieces_know_what_was_asked(store):
    again = SampleStore(store.folder, WIDTH)
    assert again.tokens_of("chat") == 8
    assert again.pieces_of("prose")[0].openings == ((9,),)


def test_what_was_being_written_when_a_build_was_killed_is_written_over(store):
    with (store.folder / "hidden.f16").open("ab") as file:
        file.write(b"half a piece")
    again = SampleStore(store.folder, WIDTH)
    again.append("prose", [sample(40)])
    assert SampleStore(store.folder, WIDTH).open().hidden[-1, 0] == 42


@pytest.mark.parametrize("name", ["tokens.i32", "hidden.f16", "samples.json"])
def test_a_harmed_file_makes_all_of_it_absent(store, name):
    path = store.folder / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert SampleStore(store.folder, WIDTH).pieces == []


def test_samples_of_another_width_are_not_read(store):
    assert SampleStore(store.folder, WIDTH + 1).pieces == []
    assert json.loads((store.folder / "samples.json").read_bytes())["facts"]["width"] == WIDTH


def test_whole_samples_are_set_apart_of_every_kind(tmp_path):
    store = SampleStore(tmp_path, WIDTH)
    store.append("chat", [sample(10 * index) for index in range(40)])
    store.append("prose", [sample(10 * index + 5) for index in range(20)])
    samples = store.open()
    split = split_samples(samples, 0.1)
    kinds = [samples.kinds[index] for index in split.heldout]
    assert (kinds.count("chat"), kinds.count("prose")) == (4, 2)
    assert sorted([*split.training, *split.heldout]) == list(range(60))


def test_a_sample_that_begins_like_one_trained_on_measures_nothing(tmp_path):
    store = SampleStore(tmp_path, WIDTH)
    store.append("chat", [sample(10 * (index // 2 % 5), 20) for index in range(20)])
    split = split_samples(store.open(), 0.2)
    assert split.heldout == ()
    assert len(split.training) == 16
