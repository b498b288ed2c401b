"""When a plan is another one."""

from optimc.build.manifest import build_key
from optimc.recipe import Recipe
from optimc_passes.emit.tensorrt import options


def test_what_full_tensorrt_builds_depends_on_the_gpu_it_is_built_on(monkeypatch):
    def key(gpu, **target):
        monkeypatch.setattr(options, "local_architecture", lambda: gpu)
        return build_key(Recipe(name="r", model="organisation/name", target=target), (), "m")

    assert key("sm_90", backend="tensorrt") == key("sm_90", backend="tensorrt")
    assert key("sm_90", backend="tensorrt") != key("sm_100", backend="tensorrt")
    for anywhere in ({"backend": "tensorrt", "flavor": "rtx"}, {"backend": "cpu"}):
        assert key("sm_90", **anywhere) == key("sm_100", **anywhere)
