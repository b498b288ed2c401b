"""Which linear layers a quantizing pass is about, and with how many bits: options that all such passes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import Field, field_validator

from optimc_passes.artifact import Artifact
from optimc_passes.choices import Scheme
from optimc_passes.quantize.layer_patterns import LayerPatterns
from optimc_passes.quantize.linears import LinearWeight, embedding_weight, linear_weights
from optimc_passes.quantize.selection import HEAD_PATTERN, RaggedPolicy, Selection, name_layers, select
from optimc_passes.weights import Quantized, Weight, WeightStore


class LayerChoice(LayerPatterns):
    """Which layers are quantized, and how finely."""

    bits: Literal[2, 3, 4, 8, "auto"] = 4
    """Bits per code. `auto` takes bits, group size and symmetry of each layer from an `auto_bits` pass before this one
    and leaves layers dense that it left so."""
    symmetric: bool = False
    """Whether every zero point is the middle code; asymmetric groups store one each."""
    group_size: int = Field(default=64, ge=-1, le=1 << 30)
    """Columns that share a scale; -1 means the whole row."""
    ragged: RaggedPolicy = "error"
    """What to do where group_size does not divide a layer's columns: `error` refuses, naming every such layer;
    `ragged` makes the last group of a row smaller; `skip` leaves the layer dense."""
    ignore: tuple[str, ...] = Field(default=(HEAD_PATTERN,), strict=False)
    """Layers left as they are: globs over module names, or regular expressions after `re:`. `lm_head` means the output
    head whatever its name; a tied head that is not ignored is quantized apart from its embedding, which stays as it
    is."""

    @field_validator("group_size")
    @classmethod
    def _some_columns(cls, value: int) -> int:
        if value == 0:
            raise ValueError("must be positive, or -1 for the whole row")
        return value


class Schemes(NamedTuple):
    """What a pass does with each linear layer."""

    selection: Selection
    """`problems` holds everything that stops the pass, missing and quantized layers included."""
    schemes: dict[str, Scheme]
    """By module name, for the chosen layers: bits are a number, and a group size of -1 has become the row's length."""


def schemes_of(config: LayerChoice, artifact: Artifact, *, has_embedding: bool = False) -> Schemes:
    """Decide for every linear layer of the model, without reading a weight; for its input embedding, too, if asked."""
    linears = linear_weights(artifact.checkpoint.config)
    if has_embedding:
        linears = (*linears, embedding_weight(artifact.checkpoint.config))
    if config.bits == "auto":
        selection, schemes = _chosen_before(config, artifact, linears)
    else:
        selection = select(
            linears, only=config.only, ignore=config.ignore, group_size=config.group_size, ragged=config.ragged
        )
        scheme = Scheme(config.bits, config.group_size, config.symmetric)
        schemes = {linear.layer: _with_group(scheme, linear) for linear in selection.chosen}
    problems = [*selection.problems, *_unusable(selection.chosen, artifact.weights)]
    return Schemes(selection._replace(problems=tuple(problems)), schemes)


def current_weight(linear: LinearWeight, weights: Mapping[str, Weight]) -> Weight:
    """Return the layer's weight as it is now: its own if it has been given one, else the one it is tied to."""
    return weights[linear.name] if linear.name in weights else weights[linear.source]


def not_as_asked(chosen: Sequence[LinearWeight], weights: WeightStore, *, quantized: bool = True) -> list[str]:
    """Return a sentence for each chosen layer that is not quantized, or that is though it should have stayed dense."""
    return [
        f"{linear.layer} is {'not quantized' if quantized else 'quantized'}"
        for linear in chosen
        if isinstance(weights.get(linear.name), Quantized) != quantized
    ]


def describe_selection(selection: Selection, group_size: int) -> tuple[str, ...]:
    """Return a sentence for each layer that is not quantized, or is quantized apart from what it was tied to."""
    left = [f"{linear.layer} is left as it is: ignored" for linear in selection.ignored]
    left += [
        f"{linear.layer} stays dense: {linear.shape[1]} columns not divisible by group_size {group_size}"
        for linear in selection.skipped
    ]
    left += [
        f"{linear.layer} is quantized apart from {linear.tied_to}, to which it was tied; lookups do not read its codes"
        for linear in selection.chosen
        if linear.tied_to is not None
    ]
    return tuple(left)


def _with_group(scheme: Scheme, linear: LinearWeight) -> Scheme:
    columns = linear.shape[1]
    group = columns if scheme.group == -1 else min(scheme.group, columns)
    return Scheme(scheme.bits, group, scheme.symmetric)


def _chosen_before(
    config: LayerChoice, artifact: Artifact, linears: tuple[LinearWeight, ...]
) -> tuple[Selection, dict[str, Scheme]]:
    """Return the layers that an earlier pass chose a scheme for, each checked against its own group size."""
    decided = artifact.choices.schemes
    selection = select(linears, only=config.only, ignore=config.ignore, group_size=-1, ragged="error")
    if not decided:
        problem = "bits are auto, and no pass before has chosen any; put auto_bits before this pass, or give a number"
        return selection._replace(problems=(*selection.problems, problem)), {}
    problems = list(selection.problems)
    chosen, schemes = [], {}
    for linear in selection.chosen:
        scheme = decided.get(linear.layer)
        if scheme is None or scheme.bits is None:
            continue
        if config.ragged != "ragged" and scheme.group != -1 and linear.shape[1] % scheme.group:
            problems.append(
                f"{linear.layer}: {linear.shape[1]} columns not divisible by the chosen group size {scheme.group}"
            )
            continue
        chosen.append(linear)
        schemes[linear.layer] = _with_group(scheme, linear)
    if not chosen and not problems:
        problems.append("nothing to quantize: auto_bits left every layer dense that only names")
    return selection._replace(chosen=tuple(chosen), problems=tuple(problems)), schemes


def _unusable(chosen: tuple[LinearWeight, ...], weights: WeightStore) -> list[str]:
    problems = [f"{linear.source} is not in the checkpoint" for linear in chosen if linear.source not in weights]
    present = [linear for linear in chosen if linear.source in weights]
    rounded = [linear for linear in present if isinstance(current_weight(linear, weights), Quantized)]
    if rounded:
        problems.append(
            f"quantized already: {name_layers(rounded)}; one pass can quantize a layer, only and ignore say which, "
            "and an awq or smoothquant pass before this one needs `rounding: later`"
        )
    return problems
