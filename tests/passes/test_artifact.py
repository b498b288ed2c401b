import pytest

from optimc_passes.artifact import Artifact, derive_key
from optimc_passes.calibrate import Calibration


def test_the_first_key_is_the_checkpoints_digest_whatever_the_calibration(tiny_decoder):
    checkpoint = tiny_decoder().checkpoint(digest="a" * 64)
    calibration = Calibration((), "c" * 64, 0, "none")
    assert Artifact.start(checkpoint).key == Artifact.start(checkpoint, calibration).key == "a" * 64
    assert Artifact.start(checkpoint).weights is checkpoint.weights


def test_an_artifact_evolves_into_another_and_stays_what_it_was(tiny_decoder):
    artifact = Artifact.start(tiny_decoder().checkpoint())
    other = artifact.evolve(key="k")
    assert (other.key, artifact.key) == ("k", "d" * 64)
    assert other.weights is artifact.weights


def test_derived_keys_depend_on_every_part_and_on_no_order_of_names():
    assert derive_key("a", {"x": 1, "y": 2}) == derive_key("a", {"y": 2, "x": 1})
    keys = {derive_key(*parts) for parts in (["a", "b"], ["ab"], ["b", "a"], ["a", "b", None], ["a", {"b": 1}])}
    assert len(keys) == 5


def test_a_number_json_has_no_word_for_cannot_be_part_of_a_key():
    with pytest.raises(ValueError):
        derive_key(float("nan"))
