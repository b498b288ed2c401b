import pytest
from peer.llama_cpp import bench_tokens_per_s, version_in


def test_the_median_run_counts():
    assert bench_tokens_per_s([{"avg_ts": 70.0, "samples_ts": [100.0, 10.0, 101.0]}]) == 100.0


def test_a_report_of_several_tests_is_refused():
    with pytest.raises(ValueError, match="2 tests"):
        bench_tokens_per_s([{"samples_ts": [1.0]}, {"samples_ts": [2.0]}])


def test_the_version_comes_from_the_sources(tmp_path):
    lines = ("set(LLAMA_VERSION_MAJOR 0)", "set(LLAMA_VERSION_MINOR 5)", "set(LLAMA_VERSION_PATCH 2)")
    (tmp_path / "CMakeLists.txt").write_text("\n".join(lines))
    assert version_in(tmp_path) == "0.5.2"
    (tmp_path / "PACKAGE").write_text("from a package\n")
    assert version_in(tmp_path) == "0.5.2 (from a package)"
