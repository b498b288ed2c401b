"""What a chat template puts around a user's turn, as token ids: what a model must read to write the turn itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optimc.errors import PlanError, RequestError

if TYPE_CHECKING:
    from optimc_passes.heads.target_model import ChatFrame
    from optimc_runtime.chat_template import ChatTemplate
    from optimc_runtime.tokenizer import Tokenizer

_MARK = "optimc-user-turn"
"""Stands for the user's text; no template writes it of itself."""


def chat_frame(template: ChatTemplate | None, tokenizer: Tokenizer | None) -> ChatFrame | str:
    """Return the frame, or why there is none."""
    from optimc_passes.heads.target_model import ChatFrame

    if tokenizer is None:
        return "the checkpoint has no tokenizer"
    if template is None:
        return "the checkpoint has no chat template"
    try:
        text = template.render([{"role": "user", "content": _MARK}])
    except RequestError as error:
        return str(error)
    if text.count(_MARK) != 1:
        return f"the chat template writes a user's text {text.count(_MARK)} times"
    before_text, after_text = text.split(_MARK)
    before = tokenizer.encode(before_text, add_special_tokens=False) if before_text else []
    bos = tokenizer.bos_id
    if bos is not None and tokenizer.adds_bos and before[:1] != [bos]:
        before = [bos, *before]
    after = tokenizer.encode(after_text, add_special_tokens=False) if after_text else []
    if not before:
        return "the chat template writes nothing before a user's text"
    if not after or after[0] not in tokenizer.special_ids:
        return "the chat template ends a user's text with no control token, so nothing tells where a turn ends"
    return ChatFrame(before, after, frozenset({after[0]}))


def chat_frame_of(
    template_source: str | None, tokenizer: Tokenizer | None, special_tokens: dict[str, str]
) -> ChatFrame | str:
    """Return the frame of a template as checkpoints have it, or why there is none."""
    from optimc_runtime.chat_template import ChatTemplate

    if template_source is None:
        return chat_frame(None, tokenizer)
    try:
        return chat_frame(ChatTemplate(template_source, special_tokens), tokenizer)
    except PlanError as error:
        return str(error)
