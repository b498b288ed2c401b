"""Published Medusa checkpoints: both layouts are read, and what does not fit is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from optimc.errors import CheckpointError
from optimc_passes.heads.import_medusa import read_medusa
from optimc_passes.heads.reference import head_logits

HIDDEN, VOCAB = 32, 64


@pytest.fixture(scope="module")
def base(tiny_decoder: Any) -> Any:
    return tiny_decoder(hidden=HIDDEN, vocab=VOCAB).checkpoint()


def tensors(
    heads: int = 3, blocks: int = 1, own: bool = True, hidden: int = HIDDEN, vocab: int = VOCAB
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    result = {}
    for head in range(heads):
        for block in range(blocks):
            result[f"{head}.{block}.linear.weight"] = torch.randn(hidden, hidden, generator=generator)
            result[f"{head}.{block}.linear.bias"] = torch.randn(hidden, generator=generator)
        if own:
            result[f"{head}.{blocks}.weight"] = torch.randn(vocab, hidden, generator=generator)
    return result


def write(folder: Path, state: dict[str, Any], config: dict[str, Any] | None = None, form: str = "pt") -> Path:
    folder.mkdir(exist_ok=True)
    if form == "pt":
        torch.save(state, folder / "medusa_lm_head.pt")
    else:
        save_file(state, folder / "medusa_lm_head.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


CONFIG = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "somebody/Tiny"}


@pytest.mark.parametrize("form", ["pt", "safetensors"])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("own", [True, False])
def test_both_layouts_mean_what_medusas_own_code_computes(
    base: Any, tmp_path: Path, form: str, blocks: int, own: bool
) -> None:
    state = tensors(blocks=blocks, own=own)
    heads, decisions = read_medusa(write(tmp_path, state, {**CONFIG, "medusa_num_layers": blocks}, form), base)
    assert (heads.info.num_heads, heads.info.num_blocks, heads.info.conditioned) == (3, blocks, False)
    assert heads.info.projection == ("own" if own else "shared")
    assert heads.info.tree.nodes == ((0,), (0, 0), (0, 0, 0))
    assert len(decisions) == 1, "the base is the one it names"
    hidden, lm_head = torch.randn(4, HIDDEN), torch.randn(VOCAB, HIDDEN)
    for head in range(3):
        x = hidden
        for block in range(blocks):
            linear = (state[f"{head}.{block}.linear.{part}"] for part in ("weight", "bias"))
            x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, *linear))
        expected = x @ (state[f"{head}.{blocks}.weight"] if own else lm_head).T
        found = head_logits(heads, lm_head.numpy(), hidden.numpy())[:, head]
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-4)


def test_half_precision_and_a_missing_configuration(base: Any, tmp_path: Path) -> None:
    state = {name: tensor.to(torch.bfloat16) for name, tensor in tensors().items()}
    heads, _ = read_medusa(write(tmp_path, state), base)
    assert heads.info.num_heads == 3, "counted by its tensors"
    read = heads.weights["2.blocks.0.bias"].read()
    np.testing.assert_array_equal(read, state["2.0.linear.bias"].float().numpy())


def test_parameters_eighth_precision_and_negated_views_are_tensors_too(base: Any, tmp_path: Path) -> None:
    state = {name: torch.nn.Parameter(tensor) for name, tensor in tensors().items()}
    state["0.0.linear.bias"] = torch.linspace(-2, 2, 32).to(torch.float8_e4m3fn)
    state["1.0.linear.bias"] = torch._neg_view(torch.ones(32))
    heads, _ = read_medusa(write(tmp_path, state), base)
    np.testing.assert_array_equal(heads.weights["0.blocks.0.bias"].read(), state["0.0.linear.bias"].float().numpy())
    np.testing.assert_array_equal(heads.weights["1.blocks.0.bias"].read(), np.full(32, -1, np.float32))


class _Program:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_a_file_that_would_run_a_program_is_refused_unread(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read as tensors"):
        read_medusa(write(tmp_path, tensors() | {"0.0.linear.bias": _Program()}), base)
    assert not Path("ran").exists()


def test_a_base_name_of_any_length_and_letters_is_shown_on_a_line(base: Any, tmp_path: Path) -> None:
    _, decisions = read_medusa(
        write(tmp_path, tensors(), {"base_model_name_or_path": "a\x1b[31m\n" + "z" * 9999}), base
    )
    assert decisions[1].isprintable()
    assert len(decisions[1]) < 400


def test_a_single_file_is_taken_too(base: Any, tmp_path: Path) -> None:
    write(tmp_path, tensors())
    assert read_medusa(tmp_path / "medusa_lm_head.pt", base).heads.info.num_heads == 3


def test_another_base_is_a_remark(base: Any, tmp_path: Path) -> None:
    config = {**CONFIG, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    _, decisions = read_medusa(write(tmp_path, tensors(), config), base)
    assert decisions[1].startswith("the heads say base lmsys/vicuna-7b-v1.3, this is tiny")


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: tensor for key, tensor in state.items() if key != name}


def changed(values: dict[tuple[int, int], float]) -> dict[str, Any]:
    state = tensors()
    weight = state["0.0.linear.weight"].double()
    for place, value in values.items():
        weight[place] = value
    return state | {"0.0.linear.weight": weight}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "hidden": (tensors(hidden=40), None, r"0\.0\.linear\.weight is \[40, 40\], want \[32, 32\]"),
    "vocabulary": (tensors(vocab=80), None, r"0\.1\.weight is \[80, 32\], want \[64, 32\]"),
    "heads": (tensors(), {"medusa_num_heads": 5}, r"medusa_num_heads is 5, medusa_lm_head\.pt has 3"),
    "layers": (tensors(), {"medusa_num_layers": 2}, r"medusa_num_layers is 2, medusa_lm_head\.pt has 1"),
    "missing": (without(tensors(), "1.0.linear.bias"), None, r"'1\.0\.linear\.bias' is missing"),
    "no-projection": (without(tensors(), "2.1.weight"), None, r"'2\.1\.weight' is missing"),
    "extra": (tensors() | {"1.4.weight": torch.zeros(64, 32)}, None, r"'1\.4\.weight' is one too many"),
    "unknown": (tensors() | {"lm_head.weight": torch.zeros(64, 32)}, None, r"'lm_head\.weight' is no tensor of Medusa"),
    "empty": ({}, None, "no residual block"),
    "far-apart": (tensors() | {"9999.0.linear.bias": torch.zeros(32)}, None, "too few for 10000 heads"),
    "endless-number": (tensors() | {f"{'9' * 5000}.0.linear.bias": torch.zeros(32)}, None, "is no tensor of Medusa"),
    "heads-as-text": (tensors(), {"medusa_num_heads": "3"}, r"medusa_num_heads is '3', medusa_lm_head\.pt has 3"),
    "not-a-number": (changed({(3, 5): torch.nan}), None, r"0\.0\.linear\.weight holds values that are no finite"),
    "beyond-float32": (changed({(0, 0): 1e300}), None, r"0\.0\.linear\.weight holds values that are no finite"),
    "complex": (tensors() | {"0.0.linear.bias": torch.zeros(32, dtype=torch.complex64)}, None, "is complex64, want"),
    "sparse": (tensors() | {"0.0.linear.weight": torch.eye(32).to_sparse()}, None, r"0\.0\.linear\.weight is no plain"),
    "absent": (
        tensors() | {"0.0.linear.bias": torch.empty(32, device="meta")},
        None,
        r"0\.0\.linear\.bias is no plain",
    ),
    "integers": (tensors() | {"0.0.linear.bias": torch.zeros(32, dtype=torch.int32)}, None, "is int32, want floating"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_does_not_fit_is_refused_by_name(base: Any, tmp_path: Path, case: str) -> None:
    state, config, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        read_medusa(write(tmp_path, state, config), base)


def test_files_that_are_none_are_refused(base: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no Medusa heads; want medusa_lm_head"):
        read_medusa(tmp_path, base)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"no pickle at all")
    with pytest.raises(CheckpointError, match="cannot be read as tensors"):
        read_medusa(tmp_path, base)
    torch.save([torch.zeros(3)], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="something else than tensors by name"):
        read_medusa(tmp_path, base)
