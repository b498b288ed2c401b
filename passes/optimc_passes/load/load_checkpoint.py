"""From what a recipe calls a model to a checked, lazily read checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from optimc_passes.checkpoint import Checkpoint
from optimc_passes.formats.read import Gathered, gather_quantized
from optimc_passes.load.config import LoadedConfig, read_config
from optimc_passes.load.digest import digest_checkpoint
from optimc_passes.load.generation_defaults import read_generation_defaults
from optimc_passes.load.gguf import convert_gguf, read_gguf_config
from optimc_passes.load.hub import fetch_side_files, fetch_weights
from optimc_passes.load.json_file import read_optional_json_object
from optimc_passes.load.match_tensors import match_tensors
from optimc_passes.load.parameters import ParameterTable, list_parameters
from optimc_passes.load.shards import TensorTable, list_tensors
from optimc_passes.load.source import FolderSource, GgufSource, HubSource, Source, find_source
from optimc_passes.load.token_ids import resolve_special_ids
from optimc_passes.load.tokenizer_files import check_vocabulary, read_tokenizer
from optimc_passes.quantize.linears import linear_weights
from optimc_passes.weights import WeightStore

CheckConfig = Callable[[Any], None]
"""Sees the transformers configuration and raises if the model cannot be compiled."""


def _accept_all(_config: Any) -> None:
    """Accept every configuration."""


def load_config(
    model: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Return the checked transformers configuration of `model` without looking at weights.

    Raises as `load_checkpoint` does; of a hub id only the small files are fetched.
    """
    source = find_source(model, revision)
    if isinstance(source, GgufSource):
        return read_gguf_config(source.path)
    folder = _side_files(source, trust_remote_code)
    return read_config(folder, trust_remote_code=trust_remote_code).config


def load_checkpoint(
    model: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    cache_dir: Path,
    check_config: CheckConfig = _accept_all,
) -> Checkpoint:
    """Open the checkpoint `model` names: a folder, a .gguf file or a hub id with a revision.

    Weights stay on disk, in the checkpoint's dtype, until somebody reads them; each parameter of the model appears
    once, under its transformers name, a tied head under the embedding's; layers quantized by GPTQ, AWQ or in a
    compressed-tensors format keep their codes. `config.tie_word_embeddings` says whether
    the head is tied in fact. `cache_dir` keeps converted .gguf files. `check_config` is called before any weight file
    is opened or fetched.

    Raises CheckpointError if files are missing, damaged or contradict each other, UnsupportedModelError if the model
    is one that cannot be loaded, both naming file and tensors or keys.
    """
    opened = _open(find_source(model, revision), trust_remote_code, cache_dir, check_config)
    folder, loaded = opened.folder, opened.loaded
    notes = list(loaded.notes)
    config = loaded.config
    table = list_tensors(folder)
    parameters = list_parameters(config, loaded.model_class)
    quantized = _gather(table, loaded, parameters, str(folder))
    plain = replace(table, entries={name: e for name, e in table.entries.items() if name not in quantized.used})
    match = match_tensors(plain, parameters, str(folder), quantized.weights)
    notes += [*quantized.notes, *match.notes]
    text_config = config.get_text_config(decoder=True)
    config.tie_word_embeddings = text_config.tie_word_embeddings = match.tied
    tokenizer = read_tokenizer(folder, notes)
    check_vocabulary(tokenizer, text_config.vocab_size, notes)
    generation = read_optional_json_object(folder / "generation_config.json")
    ids = resolve_special_ids(
        loaded.raw,
        generation,
        tokenizer.special_tokens,
        _token_to_id(tokenizer.tokenizer_json),
        defaults={f"{kind}_token_id": getattr(text_config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")},
        vocab_size=text_config.vocab_size,
        notes=notes,
    )
    return Checkpoint(
        source=str(model),
        digest=digest_checkpoint(folder, table.files, with_code=bool(getattr(config, "auto_map", None))),
        config=config,
        weights=WeightStore(
            {name: entry.as_weight() for name, entry in match.entries.items()} | dict(quantized.weights)
        ),
        tokenizer=tokenizer,
        bos=ids.bos,
        eos=ids.eos,
        pad=ids.pad,
        generation_defaults=read_generation_defaults(generation, notes),
        notes=tuple(dict.fromkeys(notes)),
        folder=folder,
    )


def _gather(table: TensorTable, loaded: LoadedConfig, parameters: ParameterTable, where: str) -> Gathered:
    if loaded.quantization is None:
        return Gathered({}, frozenset(), ())
    return gather_quantized(table.entries, loaded.quantization, linear_weights(loaded.config), parameters, where)


@dataclass(frozen=True)
class _Opened:
    """A local folder whose configuration has been accepted."""

    folder: Path
    loaded: LoadedConfig


def _open(source: Source, trust_remote_code: bool, cache_dir: Path, check_config: CheckConfig) -> _Opened:
    if isinstance(source, GgufSource):
        folder = convert_gguf(source.path, cache_dir, check_config)
    else:
        folder = _side_files(source, trust_remote_code)
    loaded = read_config(folder, trust_remote_code=trust_remote_code)
    check_config(loaded.config)
    if isinstance(source, HubSource):
        folder = fetch_weights(source, folder)
    return _Opened(folder, loaded)


def _side_files(source: FolderSource | HubSource, trust_remote_code: bool) -> Path:
    return source.path if isinstance(source, FolderSource) else fetch_side_files(source, with_code=trust_remote_code)


def _token_to_id(tokenizer_json: bytes | None) -> Callable[[str], int | None]:
    if tokenizer_json is None:
        return lambda _token: None
    return Tokenizer.from_str(tokenizer_json.decode()).token_to_id
