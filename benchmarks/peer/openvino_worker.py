"""Runs in the peers' environment: OpenVINO GenAI behind worker.py's protocol.

python openvino_worker.py MODEL-FOLDER THREADS
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

from peer.worker import answer_questions


class OpenVinoEngine:
    """LLMPipeline for one request, ContinuousBatchingPipeline for several. Each is made when it is first needed."""

    def __init__(self, model: str, threads: int) -> None:
        self._model = model
        self._threads = threads
        self._single: Any = None
        self._batching: Any = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["ask"] == "versions":
            return {"openvino": ov.__version__, "openvino-genai": genai.__version__}
        prompts: list[list[int]] = question["prompts"]
        config = genai.GenerationConfig()
        config.max_new_tokens = question["output_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        return {"requests": self._one(prompts[0], config) if len(prompts) == 1 else self._many(prompts, config)}

    def _one(self, prompt: list[int], config: Any) -> list[dict[str, Any]]:
        if self._single is None:
            self._single = genai.LLMPipeline(self._model, "CPU", INFERENCE_NUM_THREADS=self._threads)
        inputs = genai.TokenizedInputs(_ids(prompt), ov.Tensor(np.ones((1, len(prompt)), np.int64)))
        started_s = time.perf_counter()
        result = self._single.generate(inputs, config)
        ended_s = time.perf_counter()
        first_s = result.perf_metrics.get_ttft().mean / 1e3
        return [{"first_s": first_s, "end_s": ended_s - started_s, "tokens": len(result.tokens[0])}]

    def _many(self, prompts: list[list[int]], config: Any) -> list[dict[str, Any]]:
        if self._batching is None:
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = 1
            scheduler.max_num_batched_tokens = 2048  # 2% over the default of 256 here
            scheduler.enable_prefix_caching = False
            self._batching = genai.ContinuousBatchingPipeline(
                self._model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": self._threads}
            )
        started_s = time.perf_counter()
        results = self._batching.generate([_ids(prompt) for prompt in prompts], [config] * len(prompts))
        end_s = time.perf_counter() - started_s
        # Answers are shown together when the last one is complete.
        counts = [len(result.m_generation_ids[0]) for result in results]
        return [{"first_s": None, "end_s": end_s, "tokens": count} for count in counts]


def _ids(prompt: list[int]) -> Any:
    return ov.Tensor(np.array([prompt], np.int64))


if __name__ == "__main__":
    answer_questions(OpenVinoEngine(sys.argv[1], int(sys.argv[2])).answer)
