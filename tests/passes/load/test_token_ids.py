import pytest

from optimc.errors import CheckpointError
from optimc_passes.load.token_ids import SpecialIds, resolve_special_ids

VOCABULARY = {"<s>": 1, "</s>": 2, "<pad>": 3}


def resolve(config=None, generation=None, tokens=None, defaults=None, notes=None) -> SpecialIds:
    return resolve_special_ids(
        config or {},
        generation or {},
        tokens or {},
        VOCABULARY.get,
        defaults=defaults or {},
        vocab_size=100,
        notes=[] if notes is None else notes,
    )


def test_eos_is_the_ascending_union():
    ids = resolve({"eos_token_id": [9, 4]}, {"eos_token_id": 7}, {"eos_token": "</s>"})
    assert ids.eos == (2, 4, 7, 9)


@pytest.mark.parametrize("source", ["config", "generation"])
def test_an_integer_and_a_list_of_one_are_the_same(source):
    assert resolve(**{source: {"eos_token_id": 5}}) == resolve(**{source: {"eos_token_id": [5]}})


def test_class_defaults_count_only_when_nothing_is_stated():
    defaults = {"eos_token_id": 50, "bos_token_id": 51}
    assert resolve(defaults=defaults) == SpecialIds(51, (50,), None)
    assert resolve(tokens={"eos_token": "</s>"}, defaults=defaults).eos == (2,)


def test_bos_and_pad_take_the_first_that_is_stated():
    ids = resolve(
        {"bos_token_id": 8}, {"bos_token_id": 9, "pad_token_id": 10}, {"bos_token": "<s>", "pad_token": "<pad>"}
    )
    assert (ids.bos, ids.pad) == (8, 10)
    assert resolve(tokens={"bos_token": "<s>"}).bos == 1


def test_no_eos_anywhere_is_an_empty_set():
    assert resolve().eos == ()


def test_ids_outside_the_vocabulary_are_dropped_with_a_note():
    notes: list[str] = []
    assert resolve({"pad_token_id": -1, "eos_token_id": [5, 100]}, notes=notes) == SpecialIds(None, (5,), None)
    assert "pad_token_id -1 is outside the vocabulary of 100 and was dropped" in notes
    assert "eos_token_id 100 is outside the vocabulary of 100 and was dropped" in notes


def test_a_token_the_vocabulary_lacks_is_no_id():
    assert resolve(tokens={"eos_token": "<|nowhere|>"}).eos == ()


@pytest.mark.parametrize("value", ["2", 2.0, True, [1, "2"]])
def test_other_types_are_refused(value):
    with pytest.raises(CheckpointError, match="eos_token_id must be an integer or a list"):
        resolve({"eos_token_id": value})
