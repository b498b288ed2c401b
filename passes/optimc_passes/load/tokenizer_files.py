"""The tokenizer of a checkpoint: one `tokenizers` file, a chat template and the special tokens' names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from optimc.errors import CheckpointError
from optimc.wording import one_line
from optimc_passes.checkpoint import TokenizerAssets
from optimc_passes.load.json_file import read_optional_json_object

TOKENIZER_NAME = "tokenizer.json"
_SLOW_FILES = (("tokenizer.model",), ("spiece.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_tokenizer(folder: Path, notes: list[str]) -> TokenizerAssets:
    """Read everything about the tokenizer that serving needs; `notes` is told what was decided on the way.

    A checkpoint with only the older files (tokenizer.model, vocab.json and merges.txt, vocab.txt) is converted by
    transformers; one with no tokenizer at all yields `tokenizer_json=None`.

    Raises CheckpointError if a file is damaged or cannot be converted.
    """
    config = read_optional_json_object(folder / "tokenizer_config.json")
    return TokenizerAssets(
        tokenizer_json=_read_tokenizer_json(folder, notes),
        chat_template=_read_chat_template(folder, config, notes),
        special_tokens=_read_special_tokens(folder, config),
    )


def _read_tokenizer_json(folder: Path, notes: list[str]) -> bytes | None:
    path = folder / TOKENIZER_NAME
    if path.is_file():
        tokenizer = _parse(path)
        # It alone decides about BOS and EOS around a text: add_bos_token in tokenizer_config.json is for the older
        # files, and transformers reads it so, too.
        text = path.read_bytes()
    elif any(all((folder / name).is_file() for name in names) for names in _SLOW_FILES):
        tokenizer = _through_transformers(folder)
        text = tokenizer.to_str().encode()
        notes.append(f"there is no {TOKENIZER_NAME}; the older tokenizer files were converted")
    else:
        notes.append("the checkpoint has no tokenizer: only token ids can be served")
        return None
    if tokenizer.truncation is None and tokenizer.padding is None:
        return text
    # Left over from training: they would cut or pad every prompt.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.to_str().encode()


def _parse(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer ({one_line(error)})") from error


def _through_transformers(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # converters fail in every way on files they do not know
        raise CheckpointError(f"{folder}: its tokenizer files cannot be converted ({one_line(error)})") from error
    # A copy, so that changing it touches nothing inside transformers.
    return Tokenizer.from_str(backend.to_str())


def _read_chat_template(folder: Path, config: Mapping[str, Any], notes: list[str]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: not UTF-8 text (byte {error.start})") from error
    template = read_optional_json_object(folder / "chat_template.json").get("chat_template")
    template = config.get("chat_template") if template is None else template
    if template is None or isinstance(template, str):
        return template
    try:
        named = {str(entry["name"]): str(entry["template"]) for entry in template}
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{folder}: chat_template is neither text nor a list of named templates") from error
    if "default" not in named and len(named) != 1:
        notes.append(f"no chat template is called default (there are {', '.join(sorted(named))}): none was taken")
        return None
    return named.get("default") or next(iter(named.values()))


def _read_special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    sources = [read_optional_json_object(folder / "special_tokens_map.json"), config]
    tokens: dict[str, str] = {}
    for source in sources:
        extra = source.get("extra_special_tokens")
        named = {**(extra if isinstance(extra, dict) else {}), **{name: source.get(name) for name in _SPECIAL_NAMES}}
        for name, value in named.items():
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def check_vocabulary(assets: TokenizerAssets, vocab_size: int, notes: list[str]) -> None:
    """Note tokens the tokenizer knows but the embedding has no row for."""
    if assets.tokenizer_json is None:
        return
    vocabulary = Tokenizer.from_str(assets.tokenizer_json.decode()).get_vocab(with_added_tokens=True)
    beyond = sorted((token_id, token) for token, token_id in vocabulary.items() if token_id >= vocab_size)
    if beyond:
        listed = ", ".join(json.dumps(token) for _, token in beyond[:5])
        notes.append(
            f"the tokenizer knows {len(beyond)} tokens beyond the {vocab_size} rows of the embedding ({listed})"
        )
