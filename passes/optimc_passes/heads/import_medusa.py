"""Medusa heads as they are published: a folder with config.json and medusa_lm_head.pt or .safetensors.

Tensors are named `{head}.{block}.linear.weight` and `.bias`. `{head}.{B}.weight` [V, d] is a head's own projection;
heads without share the model's output head. See github.com/FasterDecoding/Medusa.

Letters: K heads, B residual blocks each, d hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimc.errors import CheckpointError
from optimc.plan import DraftTreeInfo, HeadInfo, HeadsInfo
from optimc.wording import one_line
from optimc_passes.checkpoint import Checkpoint
from optimc_passes.heads.heads import Heads, block_bias, block_weight, own_projection
from optimc_passes.load.json_file import read_optional_json_object
from optimc_passes.load.safetensors_file import read_header
from optimc_passes.weights import Dense, Weight

if TYPE_CHECKING:
    import torch

NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_BLOCK = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\.linear\.(weight|bias)")
_PROJECTION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\.weight")
_LONGEST_NAME = 200
"""Letters of a base's name that are shown."""
_CONFIDENCE = tuple((float(np.log(p)), p) for p in (0.01, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0))
"""Knots for heads nobody measured: a guess is as likely as its head says."""


class Imported(NamedTuple):
    """Heads somebody else trained, and what the reader should know about them."""

    heads: Heads
    decisions: tuple[str, ...]


def read_medusa(path: Path, base: Checkpoint) -> Imported:
    """Return the heads in a folder, or in one file, for the model `base`.

    Raises CheckpointError for a file that cannot be read, and for heads that do not fit the model: naming the tensor,
    what it is and what it should be.
    """
    file = _heads_file(path)
    config = read_optional_json_object(file.parent / "config.json")
    tensors = _read_tensors(file)
    text = base.config.get_text_config(decoder=True)
    layout = _layout(file, tensors, config)
    weights = _checked_weights(file, tensors, layout, int(text.hidden_size), int(text.vocab_size))
    info = HeadsInfo(
        num_heads=layout.heads,
        hidden_size=int(text.hidden_size),
        num_blocks=layout.blocks,
        conditioned=False,
        projection="own" if layout.own else "shared",
        draft_vocab_size=int(text.vocab_size),
        draft_vocab=None,
        bits=None,
        base_hash="",
        heads=(HeadInfo(confidence=_CONFIDENCE),) * layout.heads,
        tree=DraftTreeInfo(
            nodes=tuple((0,) * depth for depth in range(1, layout.heads + 1)),
            source="chain",
            expected_tokens=None,
            costs=(),
            machine="",
        ),
    )
    return Imported(Heads(info, weights), _decisions(file, config, layout, base))


class _Layout(NamedTuple):
    heads: int
    blocks: int
    own: bool
    """Whether heads have projections of their own."""


def files_read(path: Path) -> list[Path]:
    """Return what `read_medusa` reads of a folder, or beside a file. Raises CheckpointError if it has no heads."""
    file = _heads_file(path)
    config = file.parent / "config.json"
    return [file, config] if config.is_file() else [file]


def _heads_file(path: Path) -> Path:
    """Return the file of heads in a folder, or the file itself. Raises CheckpointError if there is none."""
    if path.is_file():
        return path
    found = [path / name for name in NAMES if (path / name).is_file()]
    if not found:
        raise CheckpointError(f"{path}: no Medusa heads; want {' or '.join(NAMES)} in it")
    return found[0]


def _read_tensors(file: Path) -> dict[str, Dense]:
    if file.suffix == ".safetensors":
        return {name: entry.as_weight() for name, entry in read_header(file).items()}
    import torch

    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickles break in every way there is
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{file}: cannot be read as tensors ({reason})") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
        raise CheckpointError(f"{file}: holds something else than tensors by name")
    return {str(name): Dense.of(_array(file, str(name), tensor)) for name, tensor in loaded.items()}


def _array(file: Path, name: str, tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor as NumPy has it. Raises CheckpointError for one without plain values, as a sparse one."""
    try:
        # bfloat16 and 8-bit floats, which NumPy does not know, are widened, which loses nothing.
        wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
        array: NDArray[Any] = wide.detach().resolve_neg().contiguous().numpy()
    except (RuntimeError, TypeError) as error:  # what torch raises for all that NumPy cannot hold
        raise CheckpointError(f"{file}: {name} is no plain tensor of numbers ({one_line(error)})") from error
    return array


def _layout(file: Path, tensors: Mapping[str, Dense], config: Mapping[str, Any]) -> _Layout:
    """Return what the tensors' names say, after comparing it with the configuration."""
    blocks = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    projections = [match for name in tensors if (match := _PROJECTION.fullmatch(name))]
    known = {match.string for match in (*blocks, *projections)}
    unknown = sorted(set(tensors) - known)
    if unknown or not blocks:
        what = f"'{unknown[0]}' is no tensor of Medusa heads" if unknown else "no residual block"
        raise CheckpointError(f"{file}: {what}; want {{head}}.{{block}}.linear.weight and .bias, {{head}}.{{B}}.weight")
    layout = _Layout(
        heads=max(int(match[1]) for match in (*blocks, *projections)) + 1,
        blocks=max(int(match[2]) for match in blocks) + 1,
        own=bool(projections),
    )
    if layout.heads * layout.blocks > len(tensors):
        what = f"{layout.heads} heads of {layout.blocks} blocks"
        raise CheckpointError(f"{file}: {len(tensors)} tensors are too few for {what}; some are missing")
    for key, found in (("medusa_num_heads", layout.heads), ("medusa_num_layers", layout.blocks)):
        said = config.get(key)
        if said is not None and said != found:
            raise CheckpointError(
                f"{file.parent / 'config.json'}: {key} is {said!r}, {file.name} has {found}; correct it or take it out"
            )
    return layout


def _checked_weights(
    file: Path, tensors: Mapping[str, Dense], layout: _Layout, hidden: int, vocab: int
) -> dict[str, Weight]:
    """Return the tensors by our names. Raises CheckpointError for one that is missing, is too many or does not fit."""
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    for head in range(layout.heads):
        for block in range(layout.blocks):
            theirs = f"{head}.{block}.linear"
            wanted[f"{theirs}.weight"] = block_weight(head, block), (hidden, hidden)
            wanted[f"{theirs}.bias"] = block_bias(head, block), (hidden,)
        if layout.own:
            wanted[f"{head}.{layout.blocks}.weight"] = own_projection(head), (vocab, hidden)
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or extra:
        what = f"'{missing[0]}' is missing" if missing else f"'{extra[0]}' is one too many"
        raise CheckpointError(f"{file}: {layout.heads} heads of {layout.blocks} blocks: {what}")
    for name, (_, shape) in wanted.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{file}: {name} is {list(tensor.shape)}, want {list(shape)}: the model has a hidden size of {hidden} "
                f"and {vocab} tokens"
            )
        if tensor.dtype.kind in "iubc":
            raise CheckpointError(f"{file}: {name} is {tensor.dtype}, want floating point")
        with np.errstate(over="ignore"):
            is_usable = bool(np.isfinite(tensor.read().astype(np.float32)).all())
        if not is_usable:
            raise CheckpointError(f"{file}: {name} holds values that are no finite float32 numbers")
    return {ours: tensors[theirs] for theirs, (ours, _) in wanted.items()}


def _decisions(file: Path, config: Mapping[str, Any], layout: _Layout, base: Checkpoint) -> tuple[str, ...]:
    projection = "a projection each" if layout.own else "the model's output head"
    decisions = [f"{layout.heads} heads of {layout.blocks} blocks with {projection}, from {file.name}"]
    said = config.get("base_model_name_or_path")
    if isinstance(said, str) and Path(said).name.lower() != Path(base.source).name.lower():
        shown = "".join(letter for letter in said if letter.isprintable())[:_LONGEST_NAME]
        decisions.append(f"the heads say base {shown}, this is {base.source}: guesses may be poor, answers stay right")
    return tuple(decisions)
