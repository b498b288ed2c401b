"""What can never be served is refused on arrival, in words; what is accepted is known to fit an empty pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from optimc.errors import RequestError
from optimc_runtime.config import StepLimits
from optimc_runtime.request import SamplingParams
from optimc_runtime.stats import SpeculationStats


def check_prompt(
    token_ids: Sequence[int] | NDArray[np.integer], vocab_size: int, limits: StepLimits, *, chunked_prefill: bool
) -> NDArray[np.int64]:
    """Return the prompt as [n] int64. Raises RequestError if it is empty, no list of token ids, or too long."""
    count = len(token_ids)
    if count == 0:
        raise RequestError("the prompt is empty; it must hold at least one token", param="prompt")
    if count > limits.max_request_tokens:
        raise _too_long(f"the prompt has {count:,} tokens", limits, "prompt")
    if not chunked_prefill and count > limits.max_step_tokens:
        raise RequestError(
            f"the prompt has {count:,} tokens; with chunked prefill off, at most {limits.max_step_tokens:,} "
            "(max_step_tokens) can be served",
            param="prompt",
            code="context_length_exceeded",
        )
    try:
        prompt = np.asarray(token_ids)
    except ValueError:  # nested lists of differing lengths
        prompt = np.empty(0, object)
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise RequestError("the prompt must be a flat list of token ids", param="prompt")
    outside = prompt[(prompt < 0) | (prompt >= vocab_size)]
    if len(outside):
        raise RequestError(f"prompt: token id {outside[0]} is outside the vocabulary of {vocab_size:,}", param="prompt")
    return prompt.astype(np.int64)


def output_limit(num_prompt: int, params: SamplingParams, limits: StepLimits) -> int:
    """Return how many tokens may be generated: max_tokens, or what the limits leave when it is None.

    Raises RequestError if max_tokens, or a single token when it is None, does not fit behind the prompt, or if
    min_tokens exceeds it.
    """
    room = limits.max_request_tokens - num_prompt
    if params.max_tokens is None:
        if room < 1:
            raise _too_long(f"the prompt has {num_prompt:,} tokens and leaves no room for output", limits, "prompt")
        most = room
    else:
        most = params.max_tokens
        if most > room:
            raise _too_long(
                f"the prompt ({num_prompt:,} tokens) and max_tokens ({most:,}) make {num_prompt + most:,} tokens",
                limits,
                "max_tokens",
            )
    if params.min_tokens > most:
        raise RequestError(
            f"min_tokens ({params.min_tokens:,}) exceeds the {most:,} tokens that may be generated", param="min_tokens"
        )
    return most


def check_stops(params: SamplingParams, vocab_size: int, *, has_tokenizer: bool, has_grammar: bool) -> None:
    """Raise RequestError if what is to end the answer cannot be told, or contradicts a grammar, which says it too."""
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"stop_token_ids: {token_id} is outside the vocabulary of {vocab_size:,}", param="stop_token_ids"
            )
    if params.stop and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer, and the plan has none", param="stop")
    if has_grammar:
        for name, is_given in (("ignore_eos", params.ignore_eos), ("min_tokens", params.min_tokens > 0)):
            if is_given:
                raise RequestError(f"{name} contradicts a grammar, which says where the answer ends", param=name)


def check_speculation(wanted: str, stats: SpeculationStats | None) -> None:
    """Raise RequestError unless the engine, of which these are the figures, has the proposer a request names."""
    if wanted == "off":
        return
    names = () if stats is None else tuple(stats.proposers)
    if not names or wanted not in ("auto", *names):
        has = f"this engine has {', '.join(names)}" if names else "this engine does not speculate"
        raise RequestError(f"speculation: no proposer '{wanted}', {has}", param="speculation")


def _too_long(what: str, limits: StepLimits, param: str) -> RequestError:
    limit = f"{limits.max_request_tokens:,} tokens for prompt plus output"
    if limits.max_request_tokens < limits.max_seq_len:
        limit += f" (KV pool of {limits.num_blocks:,} blocks x {limits.block_size} tokens)"
    return RequestError(f"{what}; the limit is {limit}", param=param, code="context_length_exceeded")
