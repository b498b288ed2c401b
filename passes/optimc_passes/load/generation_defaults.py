"""Sampling settings a checkpoint recommends in generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optimc.errors import CheckpointError

_NEUTRAL: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Settings that apply only when sampling, and the value of each that changes nothing."""

_UNSUPPORTED_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "sequence_bias": (),
    "suppress_tokens": (),
    "typical_p": (1.0,),
    "top_h": (),
}
"""Settings that would change the text but that optimc does not apply, with the values that change nothing."""


def read_generation_defaults(generation: Mapping[str, Any], notes: list[str]) -> dict[str, float | int]:
    """Return the settings of generation_config.json that differ from neutral, under SamplingParams' names.

    temperature, top_p, top_k and min_p count only with `do_sample: true`, as in transformers; an explicit
    `do_sample: false` is temperature 0. repetition_penalty always counts. `notes` is told what was left out.

    Raises CheckpointError if a setting is not a finite number.
    """
    defaults: dict[str, float | int] = {}
    samples = generation.get("do_sample")
    stated = {name: _number(name, generation[name]) for name in _NEUTRAL if generation.get(name) is not None}
    differing = {name: value for name, value in stated.items() if value != _NEUTRAL[name]}
    if samples:
        defaults.update(differing)
    else:
        if samples is False:
            defaults["temperature"] = 0.0
        if differing:
            listed = ", ".join(sorted(differing))
            notes.append(f"generation_config.json sets {listed} but not do_sample: true, so they do not count")
    penalty = generation.get("repetition_penalty")
    if penalty is not None and _number("repetition_penalty", penalty) != 1:
        defaults["repetition_penalty"] = float(penalty)
    ignored = [
        name
        for name, neutral in _UNSUPPORTED_NEUTRAL.items()
        if generation.get(name) not in (None, [], {}, False) and generation[name] not in neutral
    ]
    if ignored:
        notes.append(f"generation_config.json sets {', '.join(ignored)}, which are not applied")
    return defaults


def _number(name: str, value: object) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"generation_config.json: {name} must be a finite number, got {value!r}")
    return int(value) if name == "top_k" else float(value)
