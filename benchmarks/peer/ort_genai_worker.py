"""Runs in the peers' environment: onnxruntime-genai behind worker.py's protocol.

python ort_genai_worker.py MODEL-FOLDER THREADS
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import onnxruntime_genai as og  # type: ignore[import-not-found]

from peer.worker import answer_questions


class OrtGenaiEngine:
    """A Generator per burst, of one batch, which loses nothing where prompts of one length are sent together. The
    package's Engine lets requests come and go only with PagedAttention, which the builder writes for CUDA; its static
    batches bring the same tokens, but more slowly, and need logits of every position of the prompt."""

    def __init__(self, model: str, threads: int) -> None:
        og.disable_telemetry_events()
        config = og.Config(model)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = og.Model(config)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["ask"] == "versions":
            return {"onnxruntime-genai": og.__version__, "onnxruntime": version("onnxruntime")}
        prompts = np.array(question["prompts"], np.int32)
        return {"requests": self._burst(prompts, question["output_tokens"])}

    def _burst(self, prompts: np.ndarray, output_tokens: int) -> list[dict[str, Any]]:
        """Answer prompts [N, P] int32."""
        requests, prompt_tokens = prompts.shape
        length = prompt_tokens + output_tokens
        started_s = time.perf_counter()
        params = og.GeneratorParams(self._model)
        # Until `min_length` the token that ends an answer cannot be chosen.
        params.set_search_options(batch_size=requests, do_sample=False, min_length=length, max_length=length)
        generator = og.Generator(self._model, params)
        generator.append_tokens(prompts.ravel())
        generator.generate_next_token()
        first_s = time.perf_counter() - started_s
        while not generator.is_done():
            generator.generate_next_token()
        end_s = time.perf_counter() - started_s
        counts = [len(generator.get_sequence(number)) - prompt_tokens for number in range(requests)]
        return [{"first_s": first_s, "end_s": end_s, "tokens": count} for count in counts]


if __name__ == "__main__":
    answer_questions(OrtGenaiEngine(sys.argv[1], int(sys.argv[2])).answer)
