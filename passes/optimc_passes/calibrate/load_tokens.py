"""Calibration rows: which tokens the passes measure activations on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from optimc.errors import CalibrationError
from optimc.local_path import local_path
from optimc.recipe import CalibrationSpec
from optimc_passes.calibrate import python_docs
from optimc_passes.calibrate.hub_dataset import hub_texts
from optimc_passes.calibrate.text_files import read_jsonl_file, read_text_file
from optimc_passes.calibrate.token_stream import cut_rows, encode_texts, opening_tokens

HUB_PREFIX = "hub:"


@dataclass(frozen=True, eq=False)
class Calibration:
    """Rows of real tokens; there is no padding anywhere, so nothing needs to be masked."""

    tokens: tuple[NDArray[np.int32], ...]
    """int32 rows of seq_len tokens each; the last may be shorter if fewer were allowed."""
    digest: str
    """SHA-256 over the rows, in hexadecimal."""
    tokens_used: int
    """Length of all rows together."""
    description: str
    """One line for reports."""


def load_tokens(spec: CalibrationSpec, tokenizer_json: bytes | None, *, base_dir: Path | None = None) -> Calibration:
    """Read, tokenize and pack the calibration text that `spec` asks for.

    Texts are tokenized whole, joined by blank lines and cut into rows of `spec.seq_len` tokens, so a long text is used
    to its end and short ones share rows. Each row begins with BOS if the tokenizer puts it before a text. If there are
    more rows than asked for, `spec.seed` decides which are taken. Same text, tokenizer and spec: same rows.

    A relative file name is looked up from the working directory, then from `base_dir` (the recipe's folder).

    Raises CalibrationError if the text is missing or shorter than `samples` rows and `allow_fewer` is not set, or if
    there is no tokenizer; MissingExtraError if a hub data set is asked for without the library that reads it.
    """
    if tokenizer_json is None:
        raise CalibrationError("the checkpoint has no tokenizer, so text cannot be turned into calibration tokens")
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    opening = opening_tokens(tokenizer)
    if len(opening) >= spec.seq_len:
        raise CalibrationError(f"seq_len {spec.seq_len} leaves no room beside the {len(opening)} tokens before a text")
    texts = _find_texts(spec, base_dir)
    wanted = spec.samples * spec.seq_len
    # A hub data set may be huge and arrives in random order; files are read whole and chosen from afterwards.
    stream = encode_texts(tokenizer, texts, enough_tokens=wanted if _is_hub(spec) else None)
    rows = cut_rows(stream, spec.seq_len, opening)
    chosen = _choose(rows, spec)
    used = sum(len(row) for row in chosen)
    if used < wanted and not spec.allow_fewer:
        raise CalibrationError(
            f"{spec.dataset}: {used} tokens, but {spec.samples} samples of {spec.seq_len} are {wanted}; "
            "give more text, ask for less, or set allow_fewer: true"
        )
    if not chosen:
        raise CalibrationError(f"{spec.dataset}: holds no text at all")
    description = f"{spec.dataset}: {used} tokens in {len(chosen)} rows of up to {spec.seq_len}, seed {spec.seed}"
    return Calibration(tuple(chosen), _digest(chosen), used, description)


def _is_hub(spec: CalibrationSpec) -> bool:
    return spec.dataset.startswith(HUB_PREFIX)


def _find_texts(spec: CalibrationSpec, base_dir: Path | None) -> Iterable[str]:
    if spec.dataset == python_docs.NAME:
        return python_docs.calibration_texts()
    if _is_hub(spec):
        name = spec.dataset.removeprefix(HUB_PREFIX)
        return hub_texts(name, split=spec.split, field=spec.field, seed=spec.seed)
    path = local_path(spec.dataset, *([] if base_dir is None else [base_dir])) or Path(spec.dataset)
    if path.suffix == ".jsonl":
        return read_jsonl_file(path, spec.field)
    if path.suffix == ".txt":
        return read_text_file(path)
    raise CalibrationError(
        f"dataset '{spec.dataset}' is neither {python_docs.NAME}, a .txt or .jsonl file, nor hub:organisation/name"
    )


def _choose(rows: Sequence[NDArray[np.int32]], spec: CalibrationSpec) -> list[NDArray[np.int32]]:
    """Take `samples` rows by seed; the short last row only if there is nothing to choose."""
    full = [row for row in rows if len(row) == spec.seq_len]
    if len(full) < spec.samples:
        return list(rows)
    picked = np.random.default_rng(spec.seed).permutation(len(full))[: spec.samples]
    return [full[index] for index in picked]


def _digest(rows: Sequence[NDArray[np.int32]]) -> str:
    total = hashlib.sha256()
    for row in rows:
        total.update(len(row).to_bytes(8, "little"))
        total.update(row.astype("<i4").tobytes())
    return total.hexdigest()
