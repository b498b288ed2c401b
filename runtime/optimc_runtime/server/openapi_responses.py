"""What this server answers, as JSON Schema (2020-12): every field there is, and no other.

Kept by hand beside the code that words the answers: the tests hold every answer against it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

Schema = dict[str, Any]


def _object(optional: Collection[str] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _const(value: object) -> Schema:
    return {"const": value}


NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
LOGPROB: Schema = {"type": "number", "maximum": 0.0001}
"""At most 0 but for rounding; minus infinity is written -9999."""
TOKEN_IDS: Schema = _list(COUNT)
REASON: Schema = {"enum": ["stop", "length"]}
CHAT_REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}

_token = {
    "token": TEXT,
    "logprob": LOGPROB,
    "bytes": _or_null(_list({"type": "integer", "minimum": 0, "maximum": 255})),
}
_chat_head = {"id": {"type": "string", "pattern": "^chatcmpl-[0-9a-f]{32}$"}, "created": COUNT, "model": TEXT}
_text_head = {**_chat_head, "id": {"type": "string", "pattern": "^cmpl-[0-9a-f]{32}$"}}
_chat_figures = {"logprobs": _or_null(_ref("ChatLogprobs"))}
_text_choice = {"index": COUNT, "text": TEXT, "logprobs": _or_null(_ref("CompletionLogprobs"))}

SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        error=_object(
            message={"type": "string", "minLength": 1},
            type={"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
            param=_or_null(TEXT),
            code=_or_null(TEXT),
        )
    ),
    "Usage": _object(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=_object(cached_tokens=COUNT),
    ),
    "ChatLogprobs": _object(
        content=_list(_object(**_token, top_logprobs=_list(_object(**_token), maxItems=20))), refusal=NULL
    ),
    "CompletionLogprobs": _object(
        tokens=_list(TEXT),
        token_logprobs=_list(_or_null(LOGPROB)),
        top_logprobs=_list(_or_null({"type": "object", "additionalProperties": LOGPROB})),
        text_offset=_list(COUNT),
    ),
    "AssistantToolCall": _object(
        id={"type": "string", "minLength": 9},
        type=_const("function"),
        function=_object(name=TEXT, arguments=TEXT),
    ),
    "AssistantMessage": _object(
        role=_const("assistant"),
        content=_or_null(TEXT),
        refusal=NULL,
        tool_calls=_list(_ref("AssistantToolCall"), minItems=1),
        optional=("tool_calls",),
    ),
    "ChatCompletion": _object(
        **_chat_head,
        object=_const("chat.completion"),
        choices=_list(
            _object(
                index=COUNT,
                message=_ref("AssistantMessage"),
                **_chat_figures,
                finish_reason=CHAT_REASON,
                token_ids=TOKEN_IDS,
                optional=("token_ids",),
            ),
            minItems=1,
        ),
        usage=_ref("Usage"),
    ),
    "ChatDelta": {
        "oneOf": [
            _object(role=_const("assistant"), content={"anyOf": [_const(""), NULL]}),
            _object(content=TEXT),
            _object(tool_calls=_list(_ref("AssistantToolCallDelta"), minItems=1)),
            _object(),
        ]
    },
    "AssistantToolCallDelta": {
        "oneOf": [
            _object(
                index=COUNT,
                id={"type": "string", "minLength": 9},
                type=_const("function"),
                function=_object(name=TEXT, arguments=TEXT),
            ),
            _object(index=COUNT, function=_object(arguments=TEXT)),
        ]
    },
    "ChatChunk": _object(
        **_chat_head,
        object=_const("chat.completion.chunk"),
        choices=_list(
            _object(
                index=COUNT,
                delta=_ref("ChatDelta"),
                **_chat_figures,
                finish_reason=_or_null(CHAT_REASON),
                token_ids=TOKEN_IDS,
                optional=("token_ids",),
            ),
            maxItems=1,
        ),
        usage=_or_null(_ref("Usage")),
        optional=("usage",),
    ),
    "Completion": _object(
        **_text_head,
        object=_const("text_completion"),
        choices=_list(
            _object(**_text_choice, finish_reason=REASON, token_ids=TOKEN_IDS, optional=("token_ids",)), minItems=1
        ),
        usage=_ref("Usage"),
    ),
    "CompletionChunk": _object(
        **_text_head,
        object=_const("text_completion"),
        choices=_list(
            _object(**_text_choice, finish_reason=_or_null(REASON), token_ids=TOKEN_IDS, optional=("token_ids",)),
            maxItems=1,
        ),
        usage=_or_null(_ref("Usage")),
        optional=("usage",),
    ),
    "Model": _object(
        id=TEXT,
        object=_const("model"),
        created=COUNT,
        owned_by=TEXT,
        max_model_len=COUNT,
        max_request_tokens=COUNT,
        max_prompt_tokens=_or_null(COUNT),
        max_output_tokens=_or_null(COUNT),
        max_seqs=COUNT,
        max_choices=COUNT,
        vocab_size=COUNT,
        chat={"type": "boolean"},
        tools={"type": "boolean"},
        speculation=_list(TEXT),
    ),
    "ModelList": _object(object=_const("list"), data=_list(_ref("Model"))),
    "Tokens": _object(tokens=TOKEN_IDS, count=COUNT, max_model_len=COUNT),
    "TokenText": _object(prompt=TEXT),
    "Health": _object(status=_const("ok")),
    "Unhealthy": _object(status={"enum": ["stalled", "broken", "draining"]}, detail=TEXT),
    "Figures": {
        "type": "object",
        "description": "What the page shows; fields may come and go.",
        "required": ["model", "running", "waiting"],
    },
    "Document": {"type": "object", "required": ["openapi", "info", "paths"]},
}
"""By name, as `#/components/schemas` holds them."""
