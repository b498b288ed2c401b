"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from optimc.errors import RequestError
from optimc_runtime.server.client import TextTokenizer
from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.intake import take_request
from optimc_runtime.server.prompts import chat_prompt, refuse_hopeless
from optimc_runtime.server.protocol.chat import ChatRequest
from optimc_runtime.server.protocol.generation import check_token_ids
from optimc_runtime.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from optimc_runtime.server.tools.use import tool_use


async def tokenize(context: ServerContext, request: Request) -> Response:
    """Answer with the token ids of a text, or of a conversation as the model would be given it."""
    fields = await take_request(context, request, TokenizeRequest)
    engine = context.engine
    if (fields.prompt is None) == (not fields.messages):
        raise RequestError("send either prompt or messages", param="prompt")
    if fields.prompt is not None:
        ids = await _text_ids(
            fields.prompt,
            _tokenizer(context, "prompt"),
            add_special_tokens=fields.add_special_tokens is not False,
            max_seq_len=engine.max_seq_len,
        )
    elif fields.add_special_tokens is not None:
        raise RequestError("add_special_tokens is for prompt: templates write their own", param="add_special_tokens")
    else:
        chat = ChatRequest.model_construct(messages=fields.messages)
        tool_use(chat, context.chat_template, engine.tokenizer)  # refuses what a chat completion would
        ids = await chat_prompt(chat, context.chat_template, engine.tokenizer, max_seq_len=engine.max_seq_len)
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": engine.max_seq_len})


async def detokenize(context: ServerContext, request: Request) -> Response:
    """Answer with the text of token ids, special tokens spelled out."""
    fields = await take_request(context, request, DetokenizeRequest)
    tokenizer = _tokenizer(context, "tokens")
    check_token_ids(fields.tokens, context.engine.vocab_size, "tokens")
    text = await run_in_threadpool(tokenizer.decode, fields.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text})


def _tokenizer(context: ServerContext, param: str) -> TextTokenizer:
    tokenizer = context.engine.tokenizer
    if tokenizer is None:
        raise RequestError("this plan has no tokenizer: it takes and gives token ids only", param=param)
    return tokenizer


async def _text_ids(text: str, tokenizer: TextTokenizer, *, add_special_tokens: bool, max_seq_len: int) -> list[int]:
    def encode() -> list[int]:
        refuse_hopeless(text, tokenizer, max_seq_len, "prompt")
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    return await run_in_threadpool(encode)
