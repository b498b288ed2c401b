"""Names of the tensors both sides know; all others are private to a target's program."""

from __future__ import annotations

TOKENIZER = "tokenizer/tokenizer.json"
"""A `tokenizers` file, byte for byte."""
SPECIAL_TOKENS = "tokenizer/special_tokens.json"
"""JSON object, name to text: bos_token, eos_token, ..."""
CHAT_TEMPLATE = "tokenizer/chat_template.jinja"
"""Jinja source, UTF-8."""
DRAFT_VOCAB = "heads/draft_vocab"
"""int32 [V']: the token ids Medusa heads guess among, ascending."""
