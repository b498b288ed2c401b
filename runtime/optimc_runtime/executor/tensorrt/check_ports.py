"""A deserialized engine against what the plan says of it: every port is there, none is over, each is of its type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optimc.errors import PlanCorruptError
from optimc.plan import HeadsInfo
from optimc.plan.tensorrt_program import TensorRtEngine as EngineSection
from optimc.plan.tensorrt_program import TensorRtProgram
from optimc_runtime.executor.tensorrt.engine import TensorRtEngine
from optimc_runtime.executor.tensorrt.pool import CacheTensor


def check_model_ports(
    where: str, engine: TensorRtEngine, program: TensorRtProgram, tensors: Sequence[CacheTensor]
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
    if program.hidden is not None:
        outputs[program.hidden] = "float32"
    _check(where, engine, program.model, inputs, outputs)


def check_heads_ports(where: str, engine: TensorRtEngine, section: EngineSection, info: HeadsInfo) -> None:
    """Raise PlanCorruptError unless the heads' engine has the form that the manifest describes."""
    inputs = {"hidden": "float32"} | ({"tokens": "int64"} if info.conditioned else {})
    _check(where, engine, section, inputs, {"logits": "float32"})
    form = (info.num_heads, info.draft_vocab_size)
    if engine.ports["logits"].shape[1:] != form or engine.ports["hidden"].shape[1:] != (info.hidden_size,):
        raise PlanCorruptError(
            f"{where}: heads read {engine.ports['hidden'].shape} and give {engine.ports['logits'].shape}, the manifest "
            f"describes {info.hidden_size} features and {form} logits"
        )


def _check(
    where: str, engine: TensorRtEngine, section: EngineSection, inputs: Mapping[str, str], outputs: Mapping[str, str]
) -> None:
    wanted = {name: (dtype, True) for name, dtype in inputs.items()}
    wanted |= {name: (dtype, False) for name, dtype in outputs.items()}
    found = {name: (port.dtype, port.is_input) for name, port in engine.ports.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            says, has = (_words(ports.get(name)) for ports in (wanted, found))
            raise PlanCorruptError(f"{where}: port '{name}' is {has} in the engine, the program says {says}")
    on_host = [name for name, port in engine.ports.items() if not port.is_on_device]
    if on_host:
        raise PlanCorruptError(f"{where}: ports {on_host} are read on the host, this executor gives device memory")
    if engine.num_profiles != len(section.profiles):
        raise PlanCorruptError(
            f"{where}: {engine.num_profiles} optimization profiles, the program says {len(section.profiles)}"
        )


def _words(port: tuple[str, bool] | None) -> str:
    if port is None:
        return "absent"
    dtype, is_input = port
    return f"{'an input' if is_input else 'an output'} of {dtype}"
