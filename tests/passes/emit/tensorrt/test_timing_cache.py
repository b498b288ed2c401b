"""Kernels' times between builds of full TensorRT, on a builder's configuration of our own."""

import pytest

from optimc.errors import StorageError
from optimc_passes.emit.tensorrt.timing_cache import keep_timing_cache, timing_cache_path, use_timing_cache


class Cache:
    def __init__(self, data):
        self.data = data

    def serialize(self):
        return self.data


class Config:
    """Takes caches that begin with this version; `broken` data it cannot read."""

    def __init__(self):
        self.cache = None

    def create_timing_cache(self, data):
        return None if data.startswith(b"broken") else Cache(bytes(data))

    def set_timing_cache(self, cache, ignore_mismatch):
        assert not ignore_mismatch
        if cache.data.startswith(b"other"):
            return False
        self.cache = cache
        return True

    def get_timing_cache(self):
        return self.cache


def test_a_build_begins_with_the_times_of_the_one_before(tmp_path):
    path = timing_cache_path(tmp_path, "11.4.0", "sm_90")
    first, second = Config(), Config()
    use_timing_cache(first, path)
    assert first.cache.data == b"", "there is no file yet"
    first.cache.data = b"times"
    keep_timing_cache(first, path)
    use_timing_cache(second, path)
    assert second.cache.data == b"times"


def test_times_that_are_not_taken_are_begun_anew(tmp_path):
    path = timing_cache_path(tmp_path, "11.4.0", "sm_90")
    path.parent.mkdir()
    for data in (b"broken", b"other GPU"):
        path.write_bytes(data)
        config = Config()
        use_timing_cache(config, path)
        assert config.cache.data == b""


def test_times_that_cannot_be_read_are_said_to_be(tmp_path):
    path = timing_cache_path(tmp_path, "11.4.0", "sm_90")
    path.mkdir(parents=True)
    with pytest.raises(StorageError, match="times of kernels cannot be read from .*: Is a directory; remove it"):
        use_timing_cache(Config(), path)


def test_versions_and_gpus_have_times_of_their_own(tmp_path):
    kinds = (("11.4.0", "sm_90"), ("11.5.0", "sm_90"), ("11.4.0", "sm_89"))
    assert len({timing_cache_path(tmp_path, *kind) for kind in kinds}) == 3
