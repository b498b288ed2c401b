"""A two-layer decoder written node by node as the frontend would export it, and checkpoints that fit it.

Its parameter names and shapes are those of a tiny transformers Llama, so passes that ask the model's structure agree
with it. It has no RoPE: nothing tested with it depends on positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx_ir.tape import Tape

from optimc.plan import FusionReport
from optimc_passes.checkpoint import Checkpoint, TokenizerAssets
from optimc_passes.dialect import decompose_causal
from optimc_passes.fuse.apply_rules import apply_rules
from optimc_passes.fuse.rule import Rule, recorder_of
from optimc_passes.quantize.affine import quantize_affine
from optimc_passes.weights import Dense, Quantized, WeightStore

FLOAT = ir.TensorType(ir.DataType.FLOAT)
INT64 = ir.TensorType(ir.DataType.INT64)


@dataclass
class TinyDecoder:
    """The weightless graph and its weights in memory, [N, C] for linear layers."""

    layers: int = 2
    vocab: int = 48
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    intermediate: int = 48
    biased: frozenset[str] = frozenset()
    """Short names of linear layers with a bias."""
    qk_norm: bool = False
    tied: bool = False
    arrays: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    model: ir.Model = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(7)
        self._tape = Tape()
        self._inputs = [
            ir.Value(name=name, shape=ir.Shape([dim]), type=INT64)
            for name, dim in (("input_ids", "T"), ("position_ids", "T"), ("logits_rows", "R"))
        ]
        self._constants: list[ir.Value] = []
        self.model = self._build()

    @property
    def store(self) -> WeightStore:
        return WeightStore({name: Dense.of(array) for name, array in self.arrays.items()})

    def _parameter(self, name: str, *shape: int) -> ir.Value:
        noise = self._rng.standard_normal(shape).astype(np.float32)
        self.arrays[name] = noise / np.float32(np.sqrt(shape[-1])) if len(shape) == 2 else 1 + noise / 4
        value = ir.Value(name=name, shape=ir.Shape(shape), type=FLOAT)
        self._inputs.append(value)
        return value

    def _op(
        self, op_type: str, *inputs: ir.Value, shape: Iterable[int | str], domain: str = "", **attrs: Any
    ) -> ir.Value:
        output = self._tape.op(op_type, inputs, attrs, domain=domain)
        output.shape, output.type = ir.Shape(list(shape)), FLOAT
        return output

    def _constant(self, *numbers: int) -> ir.Value:
        name = f"constant_{len(self._constants)}"
        tensor = ir.tensor(np.array(numbers, np.int64), name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=INT64, const_value=tensor)
        self._constants.append(value)
        return value

    def _linear(self, x: ir.Value, name: str, outputs: int, inputs: int, rows: str = "T") -> ir.Value:
        weight = self._parameter(f"{name}.weight", outputs, inputs)
        return self._apply(x, weight, name, rows)

    def _apply(self, x: ir.Value, weight: ir.Value, name: str, rows: str) -> ir.Value:
        outputs, inputs = weight.shape
        y = self._op(
            "MatMul", x, self._op("Transpose", weight, shape=[inputs, outputs], perm=[1, 0]), shape=[1, rows, outputs]
        )
        if name.rpartition(".")[2] in self.biased:
            y = self._op("Add", y, self._parameter(f"{name}.bias", outputs), shape=[1, rows, outputs])
        return y

    def _norm(self, x: ir.Value, name: str, width: int) -> ir.Value:
        return self._op(
            "RMSNormalization", x, self._parameter(f"{name}.weight", width), shape=x.shape, axis=-1, epsilon=1e-6
        )

    def _heads(self, x: ir.Value, name: str, heads: int) -> ir.Value:
        width = heads * self.head_dim
        if self.qk_norm and not name.endswith("v_norm"):
            split = self._op(
                "Reshape", x, self._constant(1, -1, heads, self.head_dim), shape=[1, "T", heads, self.head_dim]
            )
            x = self._norm(split, name, self.head_dim)
        return self._op("Reshape", x, self._constant(-1, width), shape=["T", width])

    def _attention(self, x: ir.Value, prefix: str, layer: int) -> ir.Value:
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q = self._linear(x, f"{prefix}.q_proj", q_width, self.hidden)
        k = self._linear(x, f"{prefix}.k_proj", kv_width, self.hidden)
        v = self._linear(x, f"{prefix}.v_proj", kv_width, self.hidden)
        out = self._op(
            "PagedAttention",
            self._heads(q, f"{prefix}.q_norm", self.heads),
            self._heads(k, f"{prefix}.k_norm", self.kv_heads),
            self._heads(v, f"{prefix}.v_norm", self.kv_heads),
            shape=["T", q_width],
            domain="optimc",
            layer=layer,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=0,
            softcap=0.0,
        )
        out = self._op("Reshape", out, self._constant(1, -1, q_width), shape=[1, "T", q_width])
        return self._linear(out, f"{prefix}.o_proj", self.hidden, q_width)

    def _mlp(self, x: ir.Value, prefix: str) -> ir.Value:
        wide = [1, "T", self.intermediate]
        gate = self._linear(x, f"{prefix}.gate_proj", self.intermediate, self.hidden)
        silu = self._op("Mul", gate, self._op("Sigmoid", gate, shape=wide), shape=wide)
        up = self._linear(x, f"{prefix}.up_proj", self.intermediate, self.hidden)
        return self._linear(
            self._op("Mul", silu, up, shape=wide), f"{prefix}.down_proj", self.hidden, self.intermediate
        )

    def _build(self) -> ir.Model:
        embedding = self._parameter("model.embed_tokens.weight", self.vocab, self.hidden)
        stream = [1, "T", self.hidden]
        rows = self._op("Gather", embedding, self._inputs[0], shape=["T", self.hidden], axis=0)
        x = self._op("Unsqueeze", rows, self._constant(0), shape=stream)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            normed = self._norm(x, f"{prefix}.input_layernorm", self.hidden)
            x = self._op("Add", x, self._attention(normed, f"{prefix}.self_attn", layer), shape=stream)
            normed = self._norm(x, f"{prefix}.post_attention_layernorm", self.hidden)
            x = self._op("Add", x, self._mlp(normed, f"{prefix}.mlp"), shape=stream)
        x = self._norm(x, "model.norm", self.hidden)
        x = self._op("Gather", x, self._inputs[2], shape=[1, "R", self.hidden], axis=1)
        if self.tied:
            logits = self._apply(x, embedding, "lm_head", "R")
        else:
            logits = self._linear(x, "lm_head", self.vocab, self.hidden, rows="R")
        logits = self._op("Squeeze", logits, self._constant(0), shape=["R", self.vocab])
        logits.name = "logits"
        graph = ir.Graph(
            self._inputs,
            [logits],
            nodes=self._tape.nodes,
            initializers=self._constants,
            opset_imports={"": 23, "optimc": 1},
            name="tiny",
        )
        return ir.Model(graph, ir_version=11)

    def checkpoint(self, digest: str = "d" * 64) -> Checkpoint:
        """The same model as a loaded checkpoint."""
        from transformers import LlamaConfig

        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            tie_word_embeddings=self.tied,
        )
        assets = TokenizerAssets(None, None)
        return Checkpoint("tiny", digest, config, self.store, assets, bos=None, eos=(), pad=None)


@pytest.fixture(scope="session")
def tiny_decoder() -> Callable[..., TinyDecoder]:
    """Make a decoder; keyword arguments are the fields of `TinyDecoder`."""
    return TinyDecoder


def _quantized(
    weight: NDArray[np.float32],
    *,
    bits: int = 4,
    group: int = 16,
    symmetric: bool = False,
    permutation: NDArray[np.int32] | None = None,
) -> Quantized:
    columns = weight if permutation is None else weight[:, permutation]
    codes, scales, zeros = quantize_affine(columns, bits, group, symmetric=symmetric)
    return Quantized(
        codes=Dense.of(codes),
        scales=Dense.of(scales),
        zeros=None if zeros is None else Dense.of(zeros),
        bits=bits,
        group=group,
        permutation=None if permutation is None else Dense.of(permutation),
    )


@pytest.fixture(scope="session")
def quantized() -> Callable[..., Quantized]:
    """Quantize an array [N, C] to the nearest codes; with `permutation`, groups run along the permuted columns."""
    return _quantized


@dataclass(frozen=True)
class Applied:
    """What rules did to a graph written as text."""

    before: ir.Model
    after: ir.Model
    report: FusionReport

    @property
    def times(self) -> int:
        return self.report.matched

    @property
    def reason(self) -> str:
        """The one reason to decline; empty if there is none."""
        reasons = [entry.reason for entry in self.report.declined]
        assert len(reasons) < 2, reasons
        return reasons[0] if reasons else ""

    @property
    def operators(self) -> Counter[str]:
        return Counter(node.op_type for node in self.after.graph)

    def node(self, op_type: str) -> ir.Node:
        (found,) = (node for node in self.after.graph if node.op_type == op_type)
        return found

    def assert_equal(self, tolerance: float = 1e-5, **inputs: np.ndarray) -> None:
        """Both graphs give the same outputs, up to float32 rounding."""
        before, after = (_run(model, inputs) for model in (self.before, self.after))
        for expected, actual in zip(before, after, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def _run(model: ir.Model, inputs: dict[str, np.ndarray]) -> list[Any]:
    proto = ir.to_proto(decompose_causal(model)).SerializeToString()
    session = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def _apply_rule(rules: type[Rule] | tuple[type[Rule], ...], text: str, opset: int = 23) -> Applied:
    header = f'<ir_version: 10, opset_import: ["" : {opset}, "optimc" : 1]>\n'
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(header + text))
    before, after = ir.from_proto(proto), ir.from_proto(proto)
    rules = rules if isinstance(rules, tuple) else (rules,)
    recorder = recorder_of(rules)
    apply_rules(after, [rule.compiled() for rule in rules], recorder)
    after.opset_imports[""] = 23  # what rules emit is of the dialect
    return Applied(before, after, recorder.report())


@pytest.fixture(scope="session")
def apply_rule() -> Callable[..., Applied]:
    """Apply a rule, or several in order, to a graph written as text: `apply_rule(rules, text, opset=23)`."""
    return _apply_rule


SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 8, "head_dim": 24}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.4,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.25,
            "attention_bias": True,
        },
    ),
    "phi3": ("Phi3Config", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 8,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "olmo2": ("Olmo2Config", {}),
}
"""Name to the transformers configuration class and what bites about it."""


@dataclass(frozen=True)
class Family:
    """A tiny random transformers model in evaluation mode, and the same as a loaded checkpoint."""

    name: str
    model: Any
    checkpoint: Checkpoint

    @property
    def config(self) -> Any:
        return self.checkpoint.config


def _make_family(name: str, **changes: Any) -> Family:
    import torch
    import transformers

    class_name, options = FAMILIES[name]
    config = getattr(transformers, class_name)(**{**SIZES, **options, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    centred = name.startswith("gemma")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 2.0).sub_(1.0 if centred else 0.0)
            elif "embed" in parameter_name or "lm_head" in parameter_name:
                parameter.normal_(0.0, 0.2 if centred else 1.0)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    store = WeightStore({n: Dense.of(p.detach().numpy().copy()) for n, p in model.named_parameters()})
    assets = TokenizerAssets(None, None)
    checkpoint = Checkpoint(name, "f" * 64, config, store, assets, bos=None, eos=(), pad=None)
    return Family(name, model.eval(), checkpoint)


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    """Each tested family of architectures in turn."""
    return _make_family(request.param)


@pytest.fixture(scope="session")
def make_family() -> Callable[..., Family]:
    """Make a family's model by name; keyword arguments are fields of its configuration."""
    return _make_family
