"""What a build's own lowering of its artifact is told."""

from types import SimpleNamespace

import pytest

from optimc.build.target_model import BuildModels
from optimc.errors import LoweringError
from optimc.recipe import Recipe
from optimc_passes.choices import Choices
from optimc_passes.emit.tensorrt import lower, options


def test_its_files_lie_in_the_builds_cache(tmp_path, monkeypatch):
    """The system's folder for temporary files may be smaller than a model."""
    told = []

    def stop(_graph, wanted, *_):
        told.append(wanted)
        raise LoweringError("far enough")

    monkeypatch.setattr(options, "local_architecture", lambda: "sm_89")
    monkeypatch.setattr(lower, "lower", stop)
    recipe = Recipe(name="r", model="organisation/name", target={"backend": "tensorrt", "flavor": "rtx"})
    artifact = SimpleNamespace(choices=Choices(), graph=object(), heads=None)
    models = BuildModels(recipe, None, 64, tmp_path / "cache")
    with pytest.raises(LoweringError, match="far enough"), models.open(artifact, tmp_path):
        pass
    assert [(each.cache, each.hidden) for each in told] == [(tmp_path / "cache", True)]
    assert models.key == BuildModels(recipe, None, 64, tmp_path / "elsewhere").key
