"""BOS, EOS and padding ids, which three files of a checkpoint may state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optimc.errors import CheckpointError


@dataclass(frozen=True)
class SpecialIds:
    """Token ids that begin, end and fill sequences."""

    bos: int | None
    eos: tuple[int, ...]
    """Every id that ends a text, ascending."""
    pad: int | None


def resolve_special_ids(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    token_to_id: Callable[[str], int | None],
    *,
    defaults: Mapping[str, Any],
    vocab_size: int,
    notes: list[str],
) -> SpecialIds:
    """Combine config.json, generation_config.json and the tokenizer.

    EOS is the union of all three, each an id or a list of ids. BOS and padding are the first that is stated, in that
    order. `defaults`, the configuration class's own values, count only where none of the three says anything: they
    are those of the family's first model. Ids outside the vocabulary are dropped with a note.

    Raises CheckpointError if an id is not an integer.
    """

    def stated(kind: str) -> list[list[int]]:
        ids = [_as_ids(source.get(f"{kind}_token_id"), kind) for source in (config, generation)]
        token = special_tokens.get(f"{kind}_token")
        token_id = None if token is None else token_to_id(token)
        ids.append([] if token_id is None else [token_id])
        ids = [_within(found, vocab_size, kind, notes) for found in ids]
        return ids if any(ids) else [_within(_as_ids(defaults.get(f"{kind}_token_id"), kind), vocab_size, kind, notes)]

    def first(kind: str) -> int | None:
        return next((ids[0] for ids in stated(kind) if ids), None)

    eos = sorted({token_id for ids in stated("eos") for token_id in ids})
    return SpecialIds(first("bos"), tuple(eos), first("pad"))


def _as_ids(value: object, kind: str) -> list[int]:
    if value is None:
        return []
    ids: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise CheckpointError(f"{kind}_token_id must be an integer or a list of integers, got {value!r}")
    return ids


def _within(ids: Iterable[int], vocab_size: int, kind: str, notes: list[str]) -> list[int]:
    kept = []
    for token_id in ids:
        if 0 <= token_id < vocab_size:
            kept.append(token_id)
        else:
            notes.append(f"{kind}_token_id {token_id} is outside the vocabulary of {vocab_size} and was dropped")
    return kept
