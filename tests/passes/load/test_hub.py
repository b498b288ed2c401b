"""No test here reaches a network: the library's one entry point is replaced, or told to stay offline."""

import shutil
from fnmatch import fnmatch

import httpx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import save_file

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc_passes.load import hub, load_config


@pytest.fixture
def publish(monkeypatch, tmp_path):
    """Replace the download by copying matching files of a folder; return the list of fetched names."""

    def make(origin):
        fetched: list[str] = []

        def snapshot(repo, *, revision, allow_patterns):
            assert (repo, revision) == ("org/name", "v1")
            local = tmp_path / "hub"
            local.mkdir(exist_ok=True)
            for path in sorted(origin.iterdir()):
                if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                    if not (local / path.name).exists():
                        fetched.append(path.name)
                    shutil.copy(path, local / path.name)
            return str(local)

        monkeypatch.setattr(hub, "snapshot_download", snapshot)
        return fetched

    return make


def test_equals_the_folder(sharded, load, publish):
    publish(sharded)
    from_hub, from_folder = load("org/name", revision="v1"), load(sharded)
    assert from_hub.digest == from_folder.digest
    assert from_hub.source == "org/name"
    assert set(from_hub.weights) == set(from_folder.weights)


def test_only_files_the_index_names_are_fetched(sharded, load, publish):
    save_file({}, sharded / "consolidated.safetensors")
    (sharded / "pytorch_model.bin").touch()
    (sharded / "evil.py").touch()
    fetched = publish(sharded)
    load("org/name", revision="v1")
    assert {name for name in fetched if not name.startswith("model-0000")} == {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_single_file_is_fetched_alone(folder, load, publish):
    save_file({}, folder / "consolidated.safetensors")
    fetched = publish(folder)
    load("org/name", revision="v1")
    assert [name for name in fetched if name.endswith(".safetensors")] == ["model.safetensors"]


def test_single_file_of_another_name_is_found(folder, load, publish):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    fetched = publish(folder)
    load("org/name", revision="v1")
    assert "weights.safetensors" in fetched


def test_refusal_costs_no_weights(folder, load, publish, tools):
    tools.edit_json(folder / "config.json", model_type="quux")
    fetched = publish(folder)
    with pytest.raises(UnsupportedModelError, match="quux"):
        load("org/name", revision="v1")
    assert "model.safetensors" not in fetched


def test_load_config_fetches_no_weights(folder, publish):
    fetched = publish(folder)
    assert load_config("org/name", revision="v1").hidden_size == 64
    assert "model.safetensors" not in fetched


def test_offline_with_an_empty_cache_says_so(load, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(
        CheckpointError, match=r"org/name@v1: no such folder here, .* and HF_HUB_OFFLINE is set"
    ) as caught:
        load("org/name", revision="v1")
    assert "\n" not in str(caught.value)


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/org/name"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RepositoryNotFoundError("no\nrepo", response=response(404)), "neither a folder here nor a repository"),
        (RevisionNotFoundError("no rev", response=response(404)), "has no such revision"),
        (GatedRepoError("gated", response=response(403)), "access must be granted"),
        (LocalEntryNotFoundError("nothing cached"), "the hub cannot be reached"),
        (HfHubHTTPError("broken\nbadly", response=response(500)), r"cannot be fetched from the hub \(broken"),
        (httpx.ConnectError("no route"), "no route"),
        (PermissionError("read-only cache"), "read-only cache"),
    ],
)
def test_every_failure_is_one_clear_line(load, monkeypatch, error, words):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError, match=f"org/name: .*{words}") as caught:
        load("org/name")
    assert "\n" not in str(caught.value)
