"""A .gguf file becomes a safetensors folder, once: transformers reads it, the cache keeps the result.

GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantized tensors are expanded to float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from optimc.errors import CheckpointError, MissingExtraError, OptimcError, UnsupportedModelError
from optimc.storage import storing
from optimc.wording import one_line
from optimc_passes.load.config import CONFIG_NAME
from optimc_passes.load.digest import file_sha256
from optimc_passes.load.shards import SINGLE_NAME

CONVERTER_VERSION = 1
"""Part of the cached folder's name: raise it when the same file would be converted differently."""

_MAGIC = b"GGUF"

_CONFIG_ATTRIBUTES: Mapping[str, str] = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.dimension_count": "head_dim",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
"""Metadata transformers may leave unread, and the configuration attribute that must then say the same."""


def convert_gguf(path: Path, cache_dir: Path, check_config: Callable[[Any], None]) -> Path:
    """Return a folder with config.json, model.safetensors (float32) and tokenizer files made from a .gguf file.

    The folder is kept in `cache_dir` under the file's SHA-256 and reused while it is unharmed. `check_config` sees the
    configuration before any tensor is expanded and may refuse it by raising.

    Raises CheckpointError if the file is no GGUF or damaged, UnsupportedModelError if transformers does not read its
    architecture or would drop something the model computes with.
    """
    _check_magic(path)
    # Not at the top: the cache reads weights with this package.
    from optimc_passes.cache_entry import EntryWriter, read_entry

    key = f"{file_sha256(path)}-{CONVERTER_VERSION}"
    folder = cache_dir / "gguf" / key
    if read_entry(folder) is not None:
        return folder
    metadata, tensor_names = _read_outline(path)
    config = _build_config(path, metadata)
    check_config(config)
    with EntryWriter(cache_dir, "gguf", key) as entry:
        with storing("the converted checkpoint", entry.folder, SafetensorError):
            _write_weights(path, config, tensor_names, entry.folder)
            _write_config(config, entry.folder)
            _write_tokenizer(path, entry.folder)
        return entry.commit({"source": path.name})


def read_gguf_config(path: Path) -> Any:
    """Return the transformers configuration a .gguf file's metadata amounts to. No tensor is read.

    Raises as `convert_gguf` does.
    """
    _check_magic(path)
    metadata, _ = _read_outline(path)
    return _build_config(path, metadata)


def _build_config(path: Path, metadata: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig
    from transformers.integrations import GGUF_CONFIG_MAPPING

    architecture = str(metadata.get("general.architecture"))
    if architecture not in GGUF_CONFIG_MAPPING:
        raise UnsupportedModelError(f"{path}: transformers does not read GGUF files of architecture '{architecture}'")
    with _failing_as_checkpoint_error(path):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    _audit_metadata(metadata, architecture, GGUF_CONFIG_MAPPING[architecture], config, path)
    return config


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    if magic != _MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file")


def _read_outline(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the file's metadata, without the vocabulary, and the names of its tensors."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingExtraError("gguf", "build", "reading a .gguf file") from None
    with _failing_as_checkpoint_error(path):
        reader = GGUFReader(path)
        fields = reader.fields.items()
        metadata = {name: field.contents() for name, field in fields if not name.startswith("tokenizer.")}
        return metadata, [tensor.name for tensor in reader.tensors]


def _audit_metadata(
    metadata: Mapping[str, Any], architecture: str, mapping: Mapping[str, str | None], config: Any, path: Path
) -> None:
    """Refuse metadata of the architecture that transformers drops and the configuration does not repeat."""
    dropped = []
    for name, value in metadata.items():
        prefix, _, key = name.partition(".")
        if prefix != architecture or mapping.get(key) is not None or value in ("none", 0, False):
            continue
        if key not in _CONFIG_ATTRIBUTES or _stated_by(config, _CONFIG_ATTRIBUTES[key]) != value:
            dropped.append(f"{name} ({str(value)[:40]})")
    if dropped:
        raise UnsupportedModelError(
            f"{path}: transformers drops {', '.join(sorted(dropped))} when it reads GGUF, so the model would be "
            "another; use the safetensors checkpoint"
        )


def _stated_by(config: Any, attribute: str) -> Any:
    if attribute == "head_dim" and getattr(config, "head_dim", None) is None:
        return config.hidden_size // config.num_attention_heads
    return getattr(config, attribute, None)


def _write_weights(path: Path, config: Any, tensor_names: list[str], folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with _failing_as_checkpoint_error(path):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        # from_pretrained would do the same, but insists on a package that only places models on devices.
        with _quiet():
            tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    if len(tensors) != len(tensor_names):
        # The tensor that usually has no parameter is the table of scaled RoPE frequencies.
        hint = " (rope_freqs.weight, the RoPE scaling, is dropped)" if "rope_freqs.weight" in tensor_names else ""
        raise UnsupportedModelError(
            f"{path}: holds {len(tensor_names)} tensors, but transformers takes up {len(tensors)}{hint}; "
            "use the safetensors checkpoint"
        )
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / SINGLE_NAME, metadata={"format": "pt"})


def _write_config(config: Any, folder: Path) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    facts = config.to_dict()
    facts.pop("_model_name_or_path", None)
    facts |= {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__], "dtype": "float32"}
    (folder / CONFIG_NAME).write_text(json.dumps(facts, indent=2, sort_keys=True), "utf-8")


def _write_tokenizer(path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    with _failing_as_checkpoint_error(path), _quiet():
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


@contextmanager
def _failing_as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OptimcError:
        raise
    except Exception as error:  # the reader raises whatever a damaged file makes it trip over
        raise CheckpointError(f"{path}: damaged, or not a model transformers can read ({one_line(error)})") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and advice meant for transformers' own users off the terminal."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
