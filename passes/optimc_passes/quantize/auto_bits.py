"""auto_bits: how many bits each layer gets, by what fewer bits do to the model's predictions on calibration text.

The unit of choice is a set of linear layers that read one value (q, k, v; gate, up): they stay alike, so that later
passes can join them. Each unit is rounded to nearest by itself, everything else left as it is, and the KL divergence of
the model's predictions from the unrounded model's is measured. Other widths and group sizes are predicted from that one
measurement by the ratio of their output errors tr(D H D^T): for small changes the divergence grows as their square. The
budget is then spent where it saves the most divergence (`allocation`), predictions of units taken to add up.

Nothing is rounded here: the choice is left in the artifact for passes with `bits: auto`. The same is done for the KV
cache of each layer if `kv` asks for it, for a `kv_quant` pass with `dtype: auto`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from optimc.plan import FrontierPoint, KvDtype, LayerReport
from optimc.recipe.model import ByteSize
from optimc_passes.artifact import Artifact
from optimc_passes.base import Metrics, Pass, PassConfig, PassContext, PassResult
from optimc_passes.choices import Choices, KvChoice, Scheme
from optimc_passes.quantize.allocation import Allocation, Option, allocate, thinned
from optimc_passes.quantize.config import current_weight
from optimc_passes.quantize.layer_patterns import LayerPatterns
from optimc_passes.quantize.linears import linear_weights
from optimc_passes.quantize.selection import name_layers, select
from optimc_passes.quantize.unit_options import Priced, Unit, priced, units_of
from optimc_passes.walk.host_bytes import walk_host_bytes
from optimc_passes.walk.structure import structure_problems
from optimc_passes.weights import Dense, Quantized

if TYPE_CHECKING:
    from optimc_passes.quantize.sensitivity import Sensitivity

KV_BITS: Mapping[KvDtype, int] = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
_FRONTIER_POINTS = 20


Measured = Literal["float32", "bfloat16", "int8", "int4"]
"""Formats of a cache whose rounding is known here."""


class KvBudget(PassConfig):
    """What the KV cache may take."""

    dtypes: tuple[Measured, ...] = Field(default=("int8", "int4"), min_length=1, strict=False)
    """Formats to choose from for each layer."""
    average_bits: float = Field(default=6.0, ge=4, le=32, strict=False)
    """Bits per number of keys and values, averaged over layers; scales not counted."""


class AutoBitsConfig(LayerPatterns):
    """What may be spent, and on what."""

    average_bits: float | None = Field(default=None, ge=2, le=16, strict=False)
    """Bits per weight, averaged over the chosen layers: codes alone, without scales and zero points. Group sizes cost
    nothing by this measure. Give this or `max_bytes`."""
    max_bytes: ByteSize | None = Field(default=None, gt=0)
    """Bytes of the chosen layers as they are stored: 2 and 3 bits take 4, 8 take 8, with scales of 2 bytes and zero
    points of 1 per group. Give this or `average_bits`."""
    bits: tuple[Literal[2, 3, 4, 8], ...] = Field(default=(2, 3, 4, 8), min_length=1, strict=False)
    """Widths to choose from."""
    dense: bool = False
    """Whether a layer may stay as it is."""
    group_sizes: tuple[int, ...] = Field(default=(64,), min_length=1, strict=False)
    """Group sizes to choose from; -1 means the whole row. A layer takes only those that divide its columns."""
    symmetric: bool = False
    """Whether every zero point is the middle code."""
    windows: int = Field(default=2, ge=1, le=1024)
    """Rows of the calibration text that divergences are measured on."""
    kv: KvBudget | None = None
    """Choose formats of the KV cache, too."""

    @field_validator("group_sizes")
    @classmethod
    def _some_columns(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if any(value == 0 or value < -1 for value in values):
            raise ValueError("must be positive, or -1 for the whole row")
        return values

    @model_validator(mode="after")
    def _one_budget(self) -> AutoBitsConfig:
        if (self.average_bits is None) == (self.max_bytes is None):
            raise ValueError("give average_bits or max_bytes, one of them")
        return self


class AutoBits(Pass[AutoBitsConfig]):
    """Chooses bits and group size for each set of layers by measured sensitivity, and says what else could be had."""

    name = "auto_bits"
    version = 1
    stage = "weights"
    config_type = AutoBitsConfig
    uses_calibration = True

    def requires(self, artifact: Artifact) -> list[str]:
        """Return layers that cannot be chosen for, and a budget that nothing fits into."""
        linears = linear_weights(artifact.checkpoint.config)
        problems = structure_problems(linears)
        selection = select(linears, only=self.config.only, ignore=self.config.ignore, group_size=-1, ragged="error")
        problems += selection.problems
        rounded = [
            linear for linear in selection.chosen if isinstance(current_weight(linear, artifact.weights), Quantized)
        ]
        if rounded:
            problems.append(
                f"quantized already: {name_layers(rounded)}; bits are chosen before weights are rounded: put auto_bits "
                "before the pass that rounds them"
            )
        units = units_of(selection.chosen)
        without = [unit for unit in units if not unit.group_sizes(self.config.group_sizes)]
        if without and not self.config.dense:
            columns = without[0].linears[0].shape[1]
            problems.append(
                f"{name_layers(without[0].linears)}: none of the group sizes "
                f"{', '.join(map(str, self.config.group_sizes))} divides {columns} columns; add one that does, or -1"
            )
        kv = self.config.kv
        if kv is not None and min(KV_BITS[dtype] for dtype in kv.dtypes) > kv.average_bits:
            problems.append(f"kv: average_bits {kv.average_bits:g} is below every format in {', '.join(kv.dtypes)}")
        if not problems and units:
            least = sum(min(self._cost(option) for option in self._options(unit, artifact)) for unit in units)
            if least > self._budget(units):
                problems.append(self._too_little(units, least))
        return problems

    def host_bytes(self, artifact: Artifact) -> int:
        """Return what a walk needs; activations of units under measurement go to files where memory is short."""
        return walk_host_bytes(artifact, streams=1).total

    def run(self, artifact: Artifact, context: PassContext) -> PassResult:
        """Measure every unit, layer by layer, then spend the budget."""
        from optimc_passes.quantize.sensitivity import Request, measure

        assert artifact.calibration is not None
        config = self.config
        linears = linear_weights(artifact.checkpoint.config)
        selection = select(linears, only=config.only, ignore=config.ignore, group_size=-1, ragged="error")
        units = units_of(selection.chosen)
        options = [self._options(unit, artifact) for unit in units]
        rows = artifact.calibration.tokens[: config.windows]
        request = Request(
            [unit for unit, of in zip(units, options, strict=True) if any(choice.scheme.bits for choice in of)],
            {unit.name: tuple(choice.scheme for choice in of) for unit, of in zip(units, options, strict=True)},
            config.kv.dtypes if config.kv is not None else (),
        )
        found = measure(artifact, request, rows, context)
        lists = [
            [Option(choice, self._cost(choice), found.divergence(unit.name, choice.scheme)) for choice in of]
            for unit, of in zip(units, options, strict=True)
        ]
        allocation = allocate(lists, self._budget(units))
        assert allocation is not None, "requires has looked at the cheapest"
        chosen = [options[unit][pick] for unit, pick in enumerate(allocation.chosen.picks)]
        schemes = {
            linear.layer: choice.scheme for unit, choice in zip(units, chosen, strict=True) for linear in unit.linears
        }
        kv, kv_lines = self._kv(found.kv)
        before = artifact.choices
        choices = Choices({**before.schemes, **schemes}, kv or before.kv)
        told = [
            *_histogram(units, chosen),
            f"divergences are measured on {found.predictions} predictions of {len(rows)} calibration windows, one set "
            "of layers at a time rounded to nearest, and their sum is a prediction",
            *kv_lines,
        ]
        return PassResult(
            artifact.evolve(choices=choices),
            self._metrics(units, chosen, allocation),
            tuple(told),
            layers=tuple(self._rows(units, chosen, found, artifact)),
            frontier=self._frontier(units, options, allocation),
            calibration_tokens=sum(len(row) for row in rows),
            resumed_at=found.resumed_at,
        )

    def _options(self, unit: Unit, artifact: Artifact) -> tuple[Priced, ...]:
        config = self.config
        stored = [current_weight(linear, artifact.weights) for linear in unit.linears]
        dense = sum(weight.nbytes for weight in stored if isinstance(weight, Dense)) if config.dense else None
        return priced(
            unit, bits=config.bits, group_sizes=config.group_sizes, symmetric=config.symmetric, dense_bytes=dense
        )

    def _cost(self, option: Priced) -> float:
        return float(option.payload_bits if self.config.max_bytes is None else option.nbytes)

    def _budget(self, units: Sequence[Unit]) -> float:
        if self.config.max_bytes is not None:
            return float(self.config.max_bytes)
        assert self.config.average_bits is not None
        return self.config.average_bits * sum(unit.elements for unit in units)

    def _too_little(self, units: Sequence[Unit], least: float) -> str:
        if self.config.max_bytes is not None:
            return f"max_bytes {self.config.max_bytes} is too little: the cheapest choice takes {least:.0f}"
        average = least / sum(unit.elements for unit in units)
        return f"average_bits {self.config.average_bits:g} is too little: the cheapest choice takes {average:g}"

    def _kv(self, measured: Sequence[Mapping[KvDtype, float]]) -> tuple[tuple[KvChoice, ...], tuple[str, ...]]:
        """Spend the budget of the cache: every layer's takes as much, so bits are costs."""
        budget = self.config.kv
        if budget is None:
            return (), ()
        options = [[Option(dtype, KV_BITS[dtype], layer[dtype]) for dtype in budget.dtypes] for layer in measured]
        allocation = allocate(options, budget.average_bits * len(options))
        assert allocation is not None, "requires has looked at the cheapest"
        dtypes = [budget.dtypes[pick] for pick in allocation.chosen.picks]
        counts = ", ".join(f"{dtypes.count(dtype)} layers in {dtype}" for dtype in dict.fromkeys(dtypes))
        line = f"KV cache: {counts}; predicted divergence {allocation.chosen.divergence:.2g} nats per token"
        return tuple(KvChoice(dtype, "token", "dynamic", 0) for dtype in dtypes), (line,)

    def _metrics(self, units: Sequence[Unit], chosen: Sequence[Priced], allocation: Allocation) -> Metrics:
        return {
            "units": len(units),
            "layers": sum(len(unit.linears) for unit in units),
            "payload_bits": sum(option.payload_bits for option in chosen) / sum(unit.elements for unit in units),
            "stored_bytes": sum(option.nbytes for option in chosen),
            "predicted_kl": allocation.chosen.divergence,
        }

    def _rows(
        self, units: Sequence[Unit], chosen: Sequence[Priced], found: Sensitivity, artifact: Artifact
    ) -> Iterator[LayerReport]:
        for unit, option in zip(units, chosen, strict=True):
            scheme = option.scheme
            error, note = None, f"{unit.name}: none of the group sizes divides its columns"
            if unit.name in found.references:
                note = (
                    f"{unit.name}: divergence {found.divergences[unit.name]:.2g} measured at "
                    f"{found.references[unit.name].bits} bits, {found.divergence(unit.name, scheme):.2g} predicted here"
                )
            if scheme.bits is not None:
                whole = found.wholes[unit.name]
                error = math.sqrt(max(found.errors[unit.name, scheme], 0.0) / whole) if whole > 0 else 0.0
            for linear in unit.linears:
                columns = linear.shape[1]
                own = priced(
                    Unit(linear.layer, (linear,)),
                    bits=(scheme.bits or 4,),
                    group_sizes=(scheme.group,),
                    symmetric=scheme.symmetric,
                    dense_bytes=None,
                )[0]
                before = current_weight(linear, artifact.weights)
                assert isinstance(before, Dense)
                yield LayerReport(
                    layer=linear.layer,
                    bits=scheme.bits,
                    group=None if scheme.bits is None else columns if scheme.group == -1 else scheme.group,
                    error=error,
                    bytes_before=before.nbytes,
                    bytes_after=before.nbytes if scheme.bits is None else own.nbytes,
                    note=note,
                )

    def _frontier(
        self, units: Sequence[Unit], options: Sequence[Sequence[Priced]], allocation: Allocation
    ) -> tuple[FrontierPoint, ...]:
        elements = sum(unit.elements for unit in units)
        points = []
        for point in thinned(allocation, _FRONTIER_POINTS):
            picked = [options[unit][pick] for unit, pick in enumerate(point.picks)]
            points.append(
                FrontierPoint(
                    bits=sum(option.payload_bits for option in picked) / elements,
                    nbytes=sum(option.nbytes for option in picked),
                    kl=point.divergence,
                    chosen=point == allocation.chosen,
                )
            )
        return tuple(points)


def _histogram(units: Sequence[Unit], chosen: Sequence[Priced]) -> list[str]:
    """Return a sentence for each format that was chosen, the narrowest first."""
    counts: dict[Scheme, list[Unit]] = {}
    for unit, option in zip(units, chosen, strict=True):
        counts.setdefault(option.scheme, []).append(unit)
    lines = []
    for scheme, members in sorted(counts.items(), key=lambda item: (item[0].bits or 99, item[0].group)):
        what = "stay dense" if scheme.bits is None else f"get {scheme.bits} bits"
        groups = "" if scheme.bits is None else " per row" if scheme.group == -1 else f" in groups of {scheme.group}"
        layers = sum(len(unit.linears) for unit in members)
        lines.append(f"{layers} layers {what}{groups}, e.g. {members[0].name}")
    return lines
