"""Every supported architecture equals transformers: the exported graph alone, and the whole way through a plan.

The models are tiny and random, but each feature bites: prompts outgrow windows and RoPE's original lengths, attention
is peaked, soft caps saturate, norms and biases are far from neutral. Float32 rounding leaves errors below 1e-5 of
the largest logit; what a wrong window, cap or frequency leaves is above 1e-2, as the last tests show.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers
from numpy.typing import NDArray

from optimc.plan import FORMAT_VERSION, Limits, Manifest, ModelInfo, Plan, Source, TargetInfo, TokenIds, write_plan
from optimc_passes.dialect import decompose_causal, is_paged_attention
from optimc_passes.dialect.rules import verify_graph
from optimc_passes.emit import LoweringOptions
from optimc_passes.emit.cpu.lower import lower as lower_cpu
from optimc_passes.emit.onnxruntime import lower as lower_onnxruntime
from optimc_passes.frontend import TESTED, export_graph
from optimc_passes.fuse.apply_rules import apply_rules
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.fuse.recorder import Recorder
from optimc_passes.fuse.rule import FusionPass
from optimc_passes.graph.attach import attach_weights
from optimc_passes.weights import Dense, WeightStore
from optimc_runtime import _native
from optimc_runtime.executor.base import StepPlan
from optimc_runtime.executor.load import load_executor

PROMPT, DECODE, CHUNK, BLOCK = 300, 20, 64, 16
TOLERANCE = 1e-4
FUSED_TOLERANCE = 1e-5
VOCAB = 384
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ORIGINAL = {"original_max_position_embeddings": 64}
SHALLOW = {"num_hidden_layers": 1}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Family:
    config_class: str
    options: dict[str, Any] = field(default_factory=dict)
    centred_norms: bool = False
    """Whether norms multiply by 1 + weight."""
    embedding_std: float = 1.0
    biased: bool = False
    factors: bool = False
    """Whether activations are multiplied by numbers, which a fused graph has in its weights."""

    def config(self) -> Any:
        return getattr(transformers, self.config_class)(**{**SIZES, **self.options})


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", {"num_hidden_layers": 3, "head_dim": 24, "tie_word_embeddings": True}),
    "llama-rope-linear": Family(
        "LlamaConfig", {**_rope("linear", factor=4.0), "attention_bias": True, "mlp_bias": True}, biased=True
    ),
    "llama-rope-llama3": Family(
        "LlamaConfig",
        {**_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL), **SHALLOW},
    ),
    "llama-rope-yarn": Family("LlamaConfig", {**_rope("yarn", factor=32.0, **ORIGINAL), **SHALLOW}),
    "qwen2": Family(
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "tie_word_embeddings": True},
        biased=True,
    ),
    "qwen3": Family("Qwen3Config", {"head_dim": 24}),
    "mistral": Family("MistralConfig", {"sliding_window": 24, "head_dim": 24}),
    "gemma2": Family(
        "Gemma2Config",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 24,
        },
        centred_norms=True,
        factors=True,
        embedding_std=0.2,
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "num_hidden_layers": 3,
            "layer_types": ALTERNATING,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
            },
        },
        centred_norms=True,
        factors=True,
        embedding_std=0.2,
    ),
    "phi3": Family("Phi3Config", {**_rope("default", partial_rotary_factor=0.5), "sliding_window": 40}),
    "phi3-rope-longrope": Family(
        "Phi3Config",
        {
            **_rope("longrope", short_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 4.5, 5.0, 6.0], long_factor=[30.0] * 8),
            "original_max_position_embeddings": 512,
            **SHALLOW,
        },
    ),
    "smollm3": Family("SmolLM3Config", {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3}),
    "olmo2": Family("Olmo2Config"),
    "granite": Family(
        "GraniteConfig",
        {
            "attention_multiplier": 0.4,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.25,
            "attention_bias": True,
        },
        biased=True,
        factors=True,
    ),
}


@dataclass
class Case:
    """One family, exported and with weights; `expected` are transformers' logits [PROMPT + DECODE, V]."""

    name: str
    config: Any
    exported: ir.Model
    store: WeightStore
    tokens: NDArray[np.int64]
    expected: NDArray[np.float32]

    @property
    def attached(self) -> ir.Model:
        return attach_weights(self.exported, self.store)

    @property
    def fused(self) -> ir.Model:
        """After every graph pass."""
        model = self.attached
        for fusion in GRAPH_PASSES:
            if issubclass(fusion, FusionPass):
                apply_rules(model, [rule.compiled() for rule in fusion.rules], Recorder())
        return model


@pytest.fixture(scope="module")
def make_case() -> Callable[[str], Case]:
    """Build each family's case once, whichever tests ask for it: an export takes seconds."""
    return functools.cache(_make_case)


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, make_case: Callable[[str], Case]) -> Case:
    return make_case(request.param)


def _make_case(name: str) -> Case:
    family = FAMILIES[name]
    config = family.config()
    tokens = np.random.default_rng(1).integers(0, VOCAB, PROMPT + DECODE)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.eval()
    _randomize(model, family)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()
    store = WeightStore({n: Dense.of(p.detach().numpy()) for n, p in model.named_parameters()})
    return Case(name, config, export_graph(config, max_seq_len=512).model, store, tokens, expected)


@torch.no_grad()
def _randomize(model: torch.nn.Module, family: Family) -> None:
    """Draw weights under which every feature matters."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 2.0).sub_(1.0 if family.centred_norms else 0.0)
        elif "embed" in name or "lm_head" in name:
            parameter.normal_(0.0, family.embedding_std)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.5)
        else:
            # Twice the neutral gain for queries and keys: scores spread over several units, attention is peaked.
            gain = 2.0 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 1.0
            parameter.normal_(0.0, gain / parameter.shape[1] ** 0.5)
    assert family.biased == any(name.endswith("bias") for name, _ in model.named_parameters())


def _relative_error(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def _run(model: ir.Model, tokens: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Run a dialect graph on one sequence in ONNX Runtime, with attention in standard operators."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    proto = ir.to_proto(decompose_causal(model)).SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    feeds = {"input_ids": tokens, "position_ids": np.arange(len(tokens)), "logits_rows": rows}
    return session.run(["logits"], feeds)[0]


def test_every_supported_architecture_is_compared_here():
    compared = {family.config().model_type for family in FAMILIES.values()}
    assert compared == set(TESTED)


def test_exported_graph_obeys_the_dialect(case: Case):
    assert verify_graph(case.exported) == []
    assert verify_graph(case.attached) == []


def test_exported_graph_equals_transformers(case: Case):
    prompt = case.tokens[:PROMPT]
    logits = _run(case.attached, prompt, np.arange(PROMPT))
    assert _relative_error(logits, case.expected[:PROMPT]) < TOLERANCE


def test_logits_are_those_of_the_asked_rows(case: Case):
    rows = np.array([3, 17, 17, 299, 0])
    logits = _run(case.attached, case.tokens[:PROMPT], rows)
    assert _relative_error(logits, case.expected[rows]) < TOLERANCE


@pytest.mark.parametrize("engine", ["onnxruntime", *_native.supported_instruction_sets()])
def test_served_plan_equals_transformers_in_chunks_and_decode(
    engine: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On ONNX Runtime, and on the cpu engine with every instruction set this machine has."""
    if engine != "onnxruntime":
        monkeypatch.setenv("OPTIMC_ISA", engine)
    backend = "onnxruntime" if engine == "onnxruntime" else "cpu"
    logits = _serve(_write_plan(tmp_path / "engine.plan", case, case.attached, backend), case.tokens)
    for start, stop in _chunks():
        error = _relative_error(logits[start:stop], case.expected[start:stop])
        assert error < TOLERANCE, f"positions {start} to {stop}"


@pytest.mark.parametrize("backend", ["onnxruntime", "cpu"])
def test_a_fused_plan_answers_as_the_unfused_one(backend: str, case: Case, tmp_path: Path):
    """To the bit on the cpu engine, whose programs are the same; but for rounding where factors went into weights."""
    plain, fused = (
        _serve(_write_plan(tmp_path / f"{name}.plan", case, model, backend), case.tokens)
        for name, model in (("plain", case.attached), ("fused", case.fused))
    )
    if backend == "cpu" and not FAMILIES[case.name].factors:
        np.testing.assert_array_equal(fused, plain)
    assert _relative_error(fused, plain) < FUSED_TOLERANCE


def _chunks() -> list[tuple[int, int]]:
    """The steps of a request: a prompt in pieces, then token by token."""
    starts = [*range(0, PROMPT, CHUNK), *range(PROMPT, PROMPT + DECODE)]
    return list(zip(starts, [*starts[1:], PROMPT + DECODE], strict=True))


def _serve(plan: Plan, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of all tokens of one sequence, computed in steps."""
    executor = load_executor(plan, threads=1)
    try:
        blocks = np.random.default_rng(2).permutation(executor.pool.num_blocks)
        steps = (executor.execute(_step(tokens, start, stop, blocks)) for start, stop in _chunks())
        # The next step may overwrite what this one answered.
        return np.concatenate([step.logits.copy() for step in steps])
    finally:
        executor.close()


def _write_plan(path: Path, case: Case, model: ir.Model, backend: str) -> Plan:
    if backend == "cpu":
        options = LoweringOptions(
            block_size=BLOCK,
            int8_activations=False,
            activation_scales="group",
            kv_dtype="float32",
            max_step_tokens=CHUNK,
            max_seqs=1,
        )
        lowered = lower_cpu(model, options)
    else:
        lowered = lower_onnxruntime(model, block_size=BLOCK)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name=case.name,
        target=TargetInfo(backend=backend, requirements=lowered.requirements),
        model=ModelInfo(
            architecture=TESTED[case.config.model_type],
            vocab_size=VOCAB,
            hidden_size=case.config.hidden_size,
            num_layers=case.config.num_hidden_layers,
        ),
        limits=Limits(max_seq_len=512, max_step_tokens=CHUNK, max_seqs=1, kv_memory_bytes=1 << 22),
        kv=lowered.kv,
        tokens=TokenIds(bos=None, eos=(), pad=None),
        program=lowered.program,
        source=Source(
            model=case.name,
            model_hash="0",
            recipe={},
            recipe_hash="0",
            calibration_hash=None,
            build_key="0",
            tools={},
        ),
    )
    write_plan(path, manifest, lowered.tensors)
    return Plan.open(path)


def _step(tokens: NDArray[np.int64], start: int, stop: int, blocks: NDArray[np.int64]) -> StepPlan:
    """Tokens [start, stop) of one sequence whose blocks lie anywhere in the pool; logits of all of them."""
    index = np.arange(start, stop)
    return StepPlan(
        tokens=tokens[start:stop],
        positions=index,
        slots=blocks[index // BLOCK] * BLOCK + index % BLOCK,
        query_start=np.array([0, stop - start], np.int32),
        context_len=np.array([start], np.int32),
        block_table=blocks[None, : -(-stop // BLOCK)].astype(np.int32),
        logits_rows=np.arange(stop - start),
    )


def _set_attribute(name: str, change: Callable[[float], float]) -> Callable[[ir.Model], None]:
    def apply(model: ir.Model) -> None:
        for node in filter(is_paged_attention, model.graph):
            old = node.attributes[name]
            node.attributes[name] = ir.Attr(name, old.type, change(old.value))

    return apply


def _shift_frequencies(model: ir.Model) -> None:
    """Multiply the rotary frequencies, the only vectors of constants, by 1.05."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        if tensor.dtype == ir.DataType.FLOAT and tensor.size > 1:
            value.const_value = ir.tensor(tensor.numpy() * np.float32(1.05), name=value.name)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("mistral", _set_attribute("window", lambda window: window + 1)),
        ("gemma2", _set_attribute("window", lambda window: 0)),
        ("gemma2", _set_attribute("softcap", lambda cap: 2 * cap)),
        ("granite", _set_attribute("scale", lambda scale: 1.1 * scale)),
        ("llama-rope-llama3", _shift_frequencies),
    ],
    ids=["window-plus-one", "no-window", "softcap", "scale", "frequencies"],
)
def test_a_wrong_graph_would_be_seen(name: str, mistake: Callable[[ir.Model], None], make_case: Callable[[str], Case]):
    case = make_case(name)
    wrong = case.attached  # a copy
    mistake(wrong)
    logits = _run(wrong, case.tokens[:PROMPT], np.arange(PROMPT))
    assert _relative_error(logits, case.expected[:PROMPT]) > 100 * TOLERANCE
