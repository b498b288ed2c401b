"""Which tensor of the checkpoint fills which parameter of the model: each exactly once, none left over."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from optimc.errors import CheckpointError
from optimc.wording import listed
from optimc_passes.load.parameters import ParameterTable
from optimc_passes.load.safetensors_file import TensorEntry
from optimc_passes.load.shards import TensorTable

RECOMPUTED = (r"(^|\.)rotary_emb\.inv_freq$",)
"""Tensors old checkpoints saved although they follow from the configuration."""

_FLOATS = ("F32", "BF16", "F16", "F64")
_INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
_COMPARED_BYTES = 1 << 24


@dataclass(frozen=True)
class Match:
    """The tensors by parameter name; a parameter that shares its values with another is left out."""

    entries: Mapping[str, TensorEntry]
    tied: bool
    """Whether any parameter was left out, that is, whether the head reuses the embedding."""
    notes: tuple[str, ...] = ()


def match_tensors(table: TensorTable, parameters: ParameterTable, where: str, quantized: Collection[str] = ()) -> Match:
    """Assign tensors to parameters by name, then decide ties by what the checkpoint holds.

    A checkpoint of the headless model, whose keys lack the base prefix, is accepted. When the configuration ties the
    head to the embedding but the checkpoint has both with different values, the head's own values are used, as
    transformers does, and a note says so. `quantized` names parameters that other tensors, not in the table, fill: a
    head among them is never tied.

    Raises CheckpointError naming every tensor (up to five of a kind) that is missing, surplus, of the wrong shape,
    or of a dtype that holds no plain weights.
    """
    notes = list(table.notes)
    ignored = RECOMPUTED + parameters.ignored_patterns
    skipped = [key for key in (*table.entries, *table.strays) if _matches(key, ignored)]
    if skipped:
        notes.append(f"{len(skipped)} tensors the model recomputes or does not use were not read: {listed(skipped)}")
    _refuse_strays(table.strays, ignored)
    named = _by_parameter_name(table.entries, parameters, ignored, where)
    _check_shapes_and_dtypes(named, parameters)
    kept, tied = _resolve_ties(named, parameters.ties, quantized, notes)
    absent = [name for name in parameters.shapes if name not in kept and name not in tied and name not in quantized]
    if absent:
        raise CheckpointError(_absent_message(absent, named, parameters, where))
    return Match(kept, bool(tied), tuple(notes))


def _refuse_strays(strays: Mapping[str, TensorEntry], ignored: Iterable[str]) -> None:
    for key, entry in strays.items():
        if not _matches(key, ignored):
            raise CheckpointError(f"{entry.path}: holds {key}, which the index assigns to no file")


def _by_parameter_name(
    entries: Mapping[str, TensorEntry], parameters: ParameterTable, ignored: Iterable[str], where: str
) -> dict[str, TensorEntry]:
    named: dict[str, TensorEntry] = {}
    surplus = []
    for key, entry in entries.items():
        prefixed = f"{parameters.base_prefix}.{key}"
        name = key if key in parameters.shapes else prefixed
        if name in parameters.shapes:
            if name in named:
                raise CheckpointError(f"{where}: both {named[name].name} and {key} would fill {name}")
            named[name] = entry
        elif not _matches(key, ignored):
            surplus.append(key)
    if surplus:
        verb = "tensor has" if len(surplus) == 1 else "tensors have"
        packed = any(key.endswith((".qweight", ".weight_packed")) for key in surplus)
        hint = "; packed weights need a quantization_config in config.json that covers them" if packed else ""
        raise CheckpointError(f"{where}: {len(surplus)} {verb} no place in the model: {listed(surplus)}{hint}")
    return named


def _check_shapes_and_dtypes(named: Mapping[str, TensorEntry], parameters: ParameterTable) -> None:
    faults = []
    for name, entry in named.items():
        wanted = parameters.shapes[name]
        allowed = _INTEGERS if name in parameters.integers else _FLOATS
        if entry.shape != wanted:
            faults.append(f"{entry.path}: {name} is {list(entry.shape)}, the configuration makes it {list(wanted)}")
        elif entry.dtype not in allowed:
            faults.append(f"{entry.path}: {name} is {entry.dtype}, readable are {', '.join(allowed)}")
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError("; ".join(faults[:5]) + more)


def _resolve_ties(
    named: Mapping[str, TensorEntry], ties: Mapping[str, str], quantized: Collection[str], notes: list[str]
) -> tuple[dict[str, TensorEntry], set[str]]:
    """Return the tensors by parameter name, each shared one once, and the names that were left out."""
    kept = dict(named)
    tied: set[str] = set()
    for target, source in ties.items():
        if target in quantized:
            continue  # it has values of its own
        if target not in kept:
            tied.add(target)
        elif source not in kept:
            kept[source] = kept.pop(target)
            tied.add(target)
        elif same_values(kept[source], kept[target]):
            del kept[target]
            tied.add(target)
        else:
            notes.append(f"the configuration ties {target} to {source}, but their values differ: both are used")
    if tied and len(tied) != len(ties):
        # One flag in the configuration says it for all of them, so there is no way to write this model down.
        raise CheckpointError(f"{listed(sorted(set(ties) - tied))} have values of their own while other ties hold")
    return kept, tied


def same_values(first: TensorEntry, second: TensorEntry) -> bool:
    """Whether two tensors hold the same numbers, compared piece by piece; shapes are equal already."""
    one, other = first.read().reshape(-1), second.read().reshape(-1)
    step = _COMPARED_BYTES // max(one.itemsize, other.itemsize)
    return all(
        np.array_equal(one[start : start + step].astype(np.float64), other[start : start + step].astype(np.float64))
        for start in range(0, one.size, step)
    )


def _absent_message(absent: list[str], named: Mapping[str, TensorEntry], parameters: ParameterTable, where: str) -> str:
    verb = "parameter has" if len(absent) == 1 else "parameters have"
    hint = ""
    if not parameters.ties and all(name.startswith("lm_head.") for name in absent):
        hint = "; set tie_word_embeddings: true in config.json if the head is meant to be the embedding"
    elif not named:
        hint = f"; not one of the {len(parameters.shapes)} the configuration asks for is there"
    return f"{where}: {len(absent)} {verb} no tensor: {listed(absent)}{hint}"


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, key) for pattern in patterns)
