"""A tiny decoder as a dialect graph and as NumPy, and plans made from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.tape import Tape

from optimc.plan import FORMAT_VERSION, Limits, Manifest, ModelInfo, Plan, Source, TargetInfo, TokenIds, write_plan
from optimc_passes.dialect import DOMAIN, DOMAIN_VERSION, OP_TYPE, PagedAttention, causal_attention
from optimc_passes.emit import Lowered
from optimc_passes.emit.onnxruntime import lower
from optimc_runtime.executor.base import StepPlan

VOCAB, HIDDEN, POSITIONS = 50, 32, 64
ATTRIBUTES = ("layer", "num_heads", "num_kv_heads", "head_dim", "scale", "window", "softcap")


class TinyDecoder:
    """Learned positions, attention with a residual, a tanh layer, a tied head."""

    def __init__(self, *specs: PagedAttention, seed: int = 0) -> None:
        self.specs = specs or (PagedAttention(0, 4, 2, 8, 0.35), PagedAttention(1, 4, 2, 8, 0.35, window=6))
        rng = np.random.default_rng(seed)
        self.weights: dict[str, np.ndarray] = {}

        def draw(name: str, *shape: int) -> None:
            self.weights[name] = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

        draw("embed", VOCAB, HIDDEN)
        self.weights["embed"] *= np.float32(np.sqrt(VOCAB))
        draw("position", POSITIONS, HIDDEN)
        for spec in self.specs:
            draw(f"{spec.layer}.q", HIDDEN, spec.q_width)
            draw(f"{spec.layer}.k", HIDDEN, spec.kv_width)
            draw(f"{spec.layer}.v", HIDDEN, spec.kv_width)
            draw(f"{spec.layer}.o", spec.q_width, HIDDEN)
            draw(f"{spec.layer}.mlp", HIDDEN, HIDDEN)

    def graph(self) -> ir.Model:
        tape = Tape()

        def port(name: str, axis: str) -> ir.Value:
            return ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([axis]))

        inputs = [port("input_ids", "T"), port("position_ids", "T"), port("logits_rows", "R")]
        weight = {name: tape.initializer(ir.tensor(array, name=name)) for name, array in self.weights.items()}
        x = tape.op(
            "Add", [tape.op("Gather", [weight["embed"], inputs[0]]), tape.op("Gather", [weight["position"], inputs[1]])]
        )
        for spec in self.specs:
            q, k, v = (tape.op("MatMul", [x, weight[f"{spec.layer}.{name}"]]) for name in "qkv")
            mixed = tape.op(OP_TYPE, [q, k, v], {name: getattr(spec, name) for name in ATTRIBUTES}, domain=DOMAIN)
            x = tape.op("Add", [x, tape.op("MatMul", [mixed, weight[f"{spec.layer}.o"]])])
            x = tape.op("Add", [x, tape.op("Tanh", [tape.op("MatMul", [x, weight[f"{spec.layer}.mlp"]])])])
        rows = tape.op("Gather", [x, inputs[2]])
        logits = tape.op("MatMul", [rows, tape.op("Transpose", [weight["embed"]], {"perm": [1, 0]})])
        logits.name, logits.dtype, logits.shape = "logits", ir.DataType.FLOAT, ir.Shape(["R", VOCAB])
        graph = ir.Graph(
            inputs,
            [logits],
            nodes=tape.nodes,
            initializers=tape.initializers,
            opset_imports={"": 23, DOMAIN: DOMAIN_VERSION},
            name="tiny",
        )
        return ir.Model(graph, ir_version=10)

    def forward(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [T, V] of one sequence, float64."""
        w = {name: array.astype(np.float64) for name, array in self.weights.items()}
        x = w["embed"][tokens] + w["position"][np.arange(len(tokens))]
        for spec in self.specs:
            q, k, v = (x @ w[f"{spec.layer}.{name}"] for name in "qkv")
            x = x + causal_attention(spec, q, k, v) @ w[f"{spec.layer}.o"]
            x = x + np.tanh(x @ w[f"{spec.layer}.mlp"])
        return x @ w["embed"].T


def _write(path: Path, lowered: Lowered, **changes: Any) -> Plan:
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name="tiny",
        target=changes.pop("target", TargetInfo(backend="onnxruntime", requirements=lowered.requirements)),
        model=ModelInfo(architecture="Tiny", vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=len(lowered.kv.layers)),
        limits=Limits(max_seq_len=POSITIONS, max_step_tokens=64, max_seqs=8, kv_memory_bytes=1 << 20),
        kv=lowered.kv,
        tokens=TokenIds(bos=None, eos=(0,), pad=None),
        program=lowered.program,
        source=Source(
            model="tiny",
            model_hash="0",
            recipe={},
            recipe_hash="0",
            calibration_hash=None,
            build_key="0",
            tools={},
        ),
    )
    write_plan(path, manifest.model_copy(update=changes), lowered.tensors)
    return Plan.open(path)


@pytest.fixture(scope="session")
def tiny_decoder() -> type[TinyDecoder]:
    return TinyDecoder


@pytest.fixture(scope="session")
def write_lowered() -> Callable[..., Plan]:
    return _write


@pytest.fixture(scope="session")
def make_plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    """Lower a tiny decoder and open its plan; keyword arguments change the manifest."""

    def make(decoder: TinyDecoder, block_size: int = 4, **changes: Any) -> Plan:
        path = tmp_path_factory.mktemp("plan") / "engine.plan"
        return _write(path, lower(decoder.graph(), block_size=block_size), **changes)

    return make


class Cache:
    """Hands out shuffled blocks and forms steps, as a scheduler would, without any of its policy."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.block_size = block_size
        self.free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.blocks: dict[Any, list[int]] = {}
        self.length: dict[Any, int] = {}

    def step(self, work: list[tuple[Any, np.ndarray]], rows: list[int] | None = None) -> StepPlan:
        """A step in which each (sequence, tokens) goes on where it stands. `rows` None asks for all logits."""
        context, slots, positions = [], [], []
        for name, tokens in work:
            start = self.length.setdefault(name, 0)
            stop = start + len(tokens)
            blocks = self.blocks.setdefault(name, [])
            while len(blocks) * self.block_size < stop:
                blocks.append(self.free.pop())
            index = np.arange(start, stop)
            slots.append(np.array(blocks)[index // self.block_size] * self.block_size + index % self.block_size)
            positions.append(index)
            context.append(start)
            self.length[name] = stop
        table = np.zeros((len(work), max(len(self.blocks[name]) for name, _ in work)), np.int32)
        for b, (name, _) in enumerate(work):
            table[b, : len(self.blocks[name])] = self.blocks[name]
        counts = [len(tokens) for _, tokens in work]
        return StepPlan(
            tokens=np.concatenate([tokens for _, tokens in work]).astype(np.int64),
            positions=np.concatenate(positions).astype(np.int64),
            slots=np.concatenate(slots).astype(np.int64),
            query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            context_len=np.array(context, np.int32),
            block_table=table,
            logits_rows=np.arange(sum(counts)) if rows is None else np.array(rows, np.int64),
        )


@pytest.fixture(scope="session")
def cache_type() -> type[Cache]:
    return Cache
