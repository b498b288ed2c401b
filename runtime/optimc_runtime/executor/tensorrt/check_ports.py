"""A deserialized engine against what the plan says of it: every port is there, none is over, each is of its type and
width, and takes the shapes that steps are cut by. An output wider than its buffer would be written over what lies
behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optimc.errors import PlanCorruptError
from optimc.plan import HeadsInfo, ModelInfo
from optimc.plan.tensorrt_program import ShapeLetter, TensorRtProgram
from optimc.plan.tensorrt_program import TensorRtEngine as EngineSection
from optimc_runtime.executor.tensorrt.engine import TensorRtEngine
from optimc_runtime.executor.tensorrt.pool import CacheTensor

Letters = tuple[ShapeLetter, ...]


def check_model_ports(
    where: str, engine: TensorRtEngine, program: TensorRtProgram, tensors: Sequence[CacheTensor], model: ModelInfo
) -> None:
    """Raise PlanCorruptError unless the model's engine has the ports of the program section."""
    attention = program.attention
    inputs = dict.fromkeys(
        ("input_ids", "position_ids", "logits_rows", attention.query_index, attention.unpad_index), "int64"
    )
    for window in attention.windows:
        inputs |= {window.context_slots: "int64", window.mask: "bool"}
    inputs |= {tensor.pool: tensor.dtype for tensor in tensors}
    if "position_ids" not in engine.ports:  # a model without rotations reads none
        del inputs["position_ids"]
    outputs = {"logits": "float32"} | {tensor.step: tensor.dtype for tensor in tensors}
    widths = {"logits": (model.vocab_size,)}
    for tensor in tensors:
        widths[tensor.pool] = widths[tensor.step] = (tensor.columns,)
    if program.hidden is not None:
        outputs[program.hidden], widths[program.hidden] = "float32", (model.hidden_size,)
    shapes: dict[str, Letters] = {"input_ids": ("T",), "logits_rows": ("R",), attention.query_index: ("B", "Q")}
    shapes |= {window.context_slots: ("B", "C") for window in attention.windows}
    _check(where, engine, program.model, inputs, outputs, widths)
    _check_profiles(where, engine, program.model, shapes)


def check_heads_ports(where: str, engine: TensorRtEngine, section: EngineSection, info: HeadsInfo) -> None:
    """Raise PlanCorruptError unless the heads' engine has the form that the manifest describes."""
    inputs = {"hidden": "float32"} | ({"tokens": "int64"} if info.conditioned else {})
    widths = {"hidden": (info.hidden_size,), "logits": (info.num_heads, info.draft_vocab_size)}
    _check(where, engine, section, inputs, {"logits": "float32"}, widths)
    _check_profiles(where, engine, section, {"hidden": ("N",)})


def _check(
    where: str,
    engine: TensorRtEngine,
    section: EngineSection,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    widths: Mapping[str, tuple[int, ...]],
) -> None:
    """`widths` are dimensions behind the first, of ports whose rows are stored."""
    wanted = {name: (dtype, True) for name, dtype in inputs.items()}
    wanted |= {name: (dtype, False) for name, dtype in outputs.items()}
    found = {name: (port.dtype, port.is_input) for name, port in engine.ports.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            says, has = (_words(ports.get(name)) for ports in (wanted, found))
            raise PlanCorruptError(f"{where}: port '{name}' is {has} in the engine, the program says {says}")
    for name, width in widths.items():
        has_width = engine.ports[name].shape[1:]
        # TensorRT may not have found out that a dimension never varies.
        if len(has_width) != len(width) or any(
            has not in (-1, says) for has, says in zip(has_width, width, strict=True)
        ):
            raise PlanCorruptError(
                f"{where}: a row of port '{name}' is {list(has_width)}, the manifest says {list(width)}"
            )
    on_host = [name for name, port in engine.ports.items() if not port.is_on_device]
    if on_host:
        raise PlanCorruptError(f"{where}: ports {on_host} are read on the host, this executor gives device memory")
    if engine.num_profiles != len(section.profiles):
        raise PlanCorruptError(
            f"{where}: {engine.num_profiles} optimization profiles, the program says {len(section.profiles)}"
        )


def _check_profiles(where: str, engine: TensorRtEngine, section: EngineSection, shapes: Mapping[str, Letters]) -> None:
    """Every profile must take inputs as large as the program says; `shapes` are their first dimensions."""
    for index, profile in enumerate(section.profiles):
        for name, letters in shapes.items():
            says = [profile.largest[letter] for letter in letters]
            most = list(engine.most(name, index)[: len(says)])
            if any(has < said for has, said in zip(most, says, strict=True)):
                raise PlanCorruptError(
                    f"{where}: profile '{profile.name}' takes '{name}' up to {most}, the program says {says}"
                )


def _words(port: tuple[str, bool] | None) -> str:
    if port is None:
        return "absent"
    dtype, is_input = port
    return f"{'an input' if is_input else 'an output'} of {dtype}"
