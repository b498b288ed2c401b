"""`kv_quant`: number formats of the KV cache, layer by layer.

Values have one scale per token and head, computed as they are written. Keys have one per token and head as well, or one
per head and channel, measured on calibration text (KIVI, arXiv 2402.02750): keys have channels that are large for every
token, and a scale they share with the others leaves those few steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from optimc.plan import KvDtype, KvKeys, LayerReport
from optimc_passes import kv_weights
from optimc_passes.artifact import Artifact
from optimc_passes.base import Metrics, Pass, PassConfig, PassContext, PassResult
from optimc_passes.choices import KV_PREFIX, Choices, KvChoice
from optimc_passes.quantize.kv_ranges import KeyScales, KvCode, assumed_scales, bytes_per_token
from optimc_passes.quantize.linears import linear_weights
from optimc_passes.weights import Dense, Weight, WeightStore

if TYPE_CHECKING:
    from optimc_passes.quantize.kv_quant_walk import SeenKeys

MOST_POSITIONS = 8192
"""Positions that scales of channels suit unless the recipe says how many."""
CHANNELS_PAY = 0.9
"""Keys get scales of channels if the error is at most this share of that with scales of tokens: those of channels are
fixed and saturate, so they must be worth it."""
_BITS: dict[KvDtype, int] = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}
_CODED: Mapping[KvDtype, KvCode] = {"int8": "int8", "int4": "int4"}
"""Dtypes whose keys can have scales of channels."""


class KvQuantConfig(PassConfig):
    """How keys and values are kept."""

    dtype: Literal["int8", "int4", "fp8", "auto"] = "int8"
    """`auto` takes each layer's dtype from an `auto_bits` pass before this one. `fp8` is for targets that have it."""
    keys: Literal["auto", "token", "channel"] = "auto"
    """Whose scale a key is rounded with: its `token`'s, computed as it is written, or its `channel`'s, measured on
    calibration text after RoPE and fixed, so that keys beyond what was seen saturate. `auto` measures which is better,
    layer by layer."""
    positions: int | None = Field(default=None, gt=0)
    """Length of the longest sequence that scales of channels must suit: RoPE goes on turning pairs of channels beyond
    the calibration windows, and what it makes of the keys there is computed. None: the model's own limit, 8192 at
    most."""
    skip_layers: tuple[int, ...] = Field(default=(), strict=False)
    """Layers, counted from 0, whose cache stays at `float_dtype`."""
    float_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the cache of skipped layers holds."""
    allow_uncalibrated: bool = False
    """Do without calibration text: keys have scales of tokens, or, with `keys: channel`, assumed ones for magnitudes up
    to 16. The plan is marked as uncalibrated then."""

    def dtypes(self) -> dict[str, KvDtype]:
        """Return every dtype asked for, by the option that asks."""
        asked: dict[str, KvDtype] = {} if self.dtype == "auto" else {"dtype": self.dtype}
        return {**asked, "float_dtype": self.float_dtype} if self.skip_layers else asked


class _Judged(NamedTuple):
    """What one layer's keys get."""

    scales: KeyScales | None
    """None: no scales of channels."""
    error: float | None
    note: str | None


class KvQuant(Pass[KvQuantConfig]):
    """Chooses what each layer's KV cache holds; no weight changes."""

    name = "kv_quant"
    version = 2
    stage = "weights"
    config_type = KvQuantConfig

    @property
    def uses_calibration(self) -> bool:
        """Whether keys may get scales of channels, and those are to be measured."""
        return self.config.keys != "token" and self.config.dtype != "fp8" and not self.config.allow_uncalibrated

    def reach(self, model_config: Any) -> int | None:
        """Return the length of the longest sequence that measured scales suit; None if none are measured."""
        return self._positions(model_config) if self.uses_calibration else None

    def skipped_beyond(self, model_config: Any) -> str | None:
        """Return a sentence on `skip_layers` the model does not have, or None."""
        layers = int(model_config.get_text_config(decoder=True).num_hidden_layers)
        beyond = sorted({layer for layer in self.config.skip_layers if not 0 <= layer < layers})
        if not beyond:
            return None
        return f"names {', '.join(map(str, beyond))}; the model has layers 0 to {layers - 1}"

    def host_bytes(self, artifact: Artifact) -> int:
        """Return a decoder layer, the embedding's rows, and two windows of the widest activations, in float32."""
        if not self.uses_calibration or artifact.calibration is None:
            return 0
        linears = [linear for linear in linear_weights(artifact.checkpoint.config) if not linear.is_head]
        layers = _num_layers(artifact)
        layer = 4 * sum(rows * columns for rows, columns in (linear.shape for linear in linears)) // layers
        widest = max(sum(linear.shape) for linear in linears)
        longest = max(len(row) for row in artifact.calibration.tokens)
        text = artifact.checkpoint.config.get_text_config(decoder=True)
        vocabulary_rows = min(int(text.vocab_size), artifact.calibration.tokens_used)
        return 2 * layer + 4 * (vocabulary_rows * int(text.hidden_size) + 4 * longest * widest)

    def requires(self, artifact: Artifact) -> list[str]:
        """Return what stands in the way of the choice."""
        config, problems = self.config, []
        if (beyond := self.skipped_beyond(artifact.checkpoint.config)) is not None:
            problems.append(f"skip_layers {beyond}")
        decided = artifact.choices.kv
        if config.dtype == "auto" and not decided:
            problems.append("dtype is auto, and no pass before has chosen any; put auto_bits with kv before this pass")
        if config.dtype != "auto" and decided:
            problems.append(
                "the cache's dtypes were chosen by a pass before; set dtype: auto, or leave out one of both"
            )
        if any(name.startswith(KV_PREFIX) for name in artifact.weights):
            problems.append("keys have scales already; one kv_quant decides for all layers")
        if config.dtype == "fp8" and config.keys == "channel":
            problems.append("fp8 has scales of tokens only; leave keys out")
        if self.uses_calibration:
            from optimc_passes.walk.structure import structure_problems

            problems += structure_problems(linear_weights(artifact.checkpoint.config))
        return problems

    def run(self, artifact: Artifact, context: PassContext) -> PassResult:
        """Decide layer by layer; calibration holds one decoder layer in memory at a time."""
        dtypes = self._dtypes(artifact)
        shape = _head_shape(artifact)
        resumed_at = tokens = None
        added: dict[str, Weight] = {}
        rows: tuple[LayerReport, ...]
        if self.uses_calibration:
            from optimc_passes.quantize.kv_quant_walk import walk_keys

            assert artifact.calibration is not None
            tokens = artifact.calibration.tokens_used

            def finish(layer: int, seen: SeenKeys | None) -> tuple[dict[str, Weight], LayerReport]:
                return _kept(layer, dtypes[layer], shape, _judge(seen))

            ways: tuple[KvKeys, ...] = ("token", "channel") if self.config.keys == "auto" else ("channel",)
            walked = walk_keys(artifact, dtypes, ways, self._positions(artifact.checkpoint.config), finish, context)
            added, rows, resumed_at = walked.weights, walked.rows, walked.resumed_at
        else:
            finished = [_kept(layer, dtype, shape, self._unseen(dtype, shape)) for layer, dtype in enumerate(dtypes)]
            added = {name: context.keep(name, weight) for weights, _ in finished for name, weight in weights.items()}
            rows = tuple(row for _, row in finished)
        context.progress(len(dtypes), len(dtypes), "")
        choices = tuple(
            self._choice(dtype, tokens, is_channel=kv_weights.key_scales(layer) in added)
            for layer, dtype in enumerate(dtypes)
        )
        return PassResult(
            artifact.evolve(
                weights=WeightStore({**artifact.weights, **added}), choices=Choices(artifact.choices.schemes, choices)
            ),
            _metrics(choices, rows),
            self._decisions(artifact, choices),
            layers=rows,
            calibration_tokens=tokens,
            resumed_at=resumed_at,
        )

    def ensures(self, before: Artifact, after: Artifact) -> list[str]:  # noqa: ARG002 - the outcome says it all
        """Return layers with keys per channel that have no scales."""
        return [
            f"layer {layer} has no key scales"
            for layer, choice in enumerate(after.choices.kv)
            if choice.keys == "channel" and kv_weights.key_scales(layer) not in after.weights
        ]

    def _dtypes(self, artifact: Artifact) -> list[KvDtype]:
        config = self.config
        asked: list[KvDtype] = (
            [choice.dtype for choice in artifact.choices.kv]
            if config.dtype == "auto"
            else [config.dtype] * _num_layers(artifact)
        )
        return [config.float_dtype if layer in config.skip_layers else dtype for layer, dtype in enumerate(asked)]

    def _positions(self, model_config: Any) -> int:
        text = model_config.get_text_config(decoder=True)
        model = int(getattr(text, "max_position_embeddings", None) or MOST_POSITIONS)
        return min(model, MOST_POSITIONS) if self.config.positions is None else self.config.positions

    def _choice(self, dtype: KvDtype, tokens: int | None, *, is_channel: bool) -> KvChoice:
        if not is_channel:
            return KvChoice(dtype, "token", "dynamic", 0)
        return KvChoice(dtype, "channel", "default" if tokens is None else "calibrated", tokens or 0)

    def _unseen(self, dtype: KvDtype, shape: tuple[int, int]) -> _Judged:
        """Return what a layer gets without calibration."""
        if dtype not in _CODED:
            return _Judged(None, None, None)
        if self.config.keys == "channel":
            return _Judged(assumed_scales(*shape, _CODED[dtype]), None, "keys per channel: uncalibrated")
        return _Judged(None, None, "keys per token")

    def _decisions(self, artifact: Artifact, choices: Sequence[KvChoice]) -> tuple[str, ...]:
        decisions = [
            f"layers.{layer}: keys and values stay in {choice.dtype}"
            for layer, choice in enumerate(choices)
            if _BITS[choice.dtype] > 8
        ]
        if any(choice.provenance == "default" for choice in choices):
            decisions.append("uncalibrated: scales of keys are assumed, and keys beyond 16 saturate")
        elif self.config.keys == "auto" and not self.uses_calibration:
            decisions.append("keys have scales of tokens: nothing was measured")
        if artifact.calibration is not None and any(choice.provenance == "calibrated" for choice in choices):
            reach = self._positions(artifact.checkpoint.config)
            decisions.append(f"scales of channels suit the first {reach} positions of a sequence")
        return tuple(decisions)


def _judge(seen: SeenKeys | None) -> _Judged:
    """Return scales of channels if they pay, or if there was no choice."""
    if seen is None:
        return _Judged(None, None, None)
    errors = seen.errors
    by_token = errors.get("token", math.inf)
    way: KvKeys = "channel" if by_token and errors["channel"] <= CHANNELS_PAY * by_token else "token"
    note = ", ".join(f"{error:.2e} per {name}" for name, error in errors.items())
    return _Judged(seen.scales if way == "channel" else None, errors[way], f"keys per {way}: {note}")


def _kept(layer: int, dtype: KvDtype, shape: tuple[int, int], judged: _Judged) -> tuple[dict[str, Weight], LayerReport]:
    """Return a layer's weights by name and its row in the report; `shape` is Hkv, D."""
    weights: dict[str, Weight] = {}
    if judged.scales is not None:
        weights[kv_weights.key_scales(layer)] = Dense.of(judged.scales.scales)
        if judged.scales.minimums is not None:
            weights[kv_weights.key_minimums(layer)] = Dense.of(judged.scales.minimums)
    row = LayerReport(
        layer=f"layers.{layer}.kv",
        bits=_BITS[dtype] if _BITS[dtype] <= 8 else None,
        error=judged.error,
        bytes_before=bytes_per_token(*shape, 32, channel_keys=False),
        bytes_after=bytes_per_token(*shape, _BITS[dtype], channel_keys=judged.scales is not None),
        note=judged.note,
    )
    return weights, row


def _metrics(choices: Sequence[KvChoice], rows: Sequence[LayerReport]) -> Metrics:
    return {
        "layers": len(choices),
        "layers_with_keys_per_channel": sum(choice.keys == "channel" for choice in choices),
        "bytes_per_token_before": sum(row.bytes_before for row in rows),
        "bytes_per_token_after": sum(row.bytes_after for row in rows),
    }


def _num_layers(artifact: Artifact) -> int:
    return int(artifact.checkpoint.config.get_text_config(decoder=True).num_hidden_layers)


def _head_shape(artifact: Artifact) -> tuple[int, int]:
    """Return Hkv and D."""
    text = artifact.checkpoint.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    return (
        int(getattr(text, "num_key_value_heads", None) or heads),
        int(getattr(text, "head_dim", None) or text.hidden_size // heads),
    )
