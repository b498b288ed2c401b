"""What an exported graph looks like. That it computes the right thing is shown in tests/e2e/test_architectures.py."""

from __future__ import annotations

import math
import resource
from collections import Counter

import onnx_ir as ir
import pytest
import transformers

from optimc.errors import UnsupportedModelError
from optimc_passes.dialect.rules import verify_graph
from optimc_passes.frontend import export_graph
from optimc_passes.frontend.export import export_checked
from optimc_passes.graph.exported import Exported

SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}


@pytest.fixture(scope="module")
def llama() -> ir.Model:
    """Tied head, biases in attention, two layers."""
    config = transformers.LlamaConfig(
        **{**SIZES, "num_hidden_layers": 2}, tie_word_embeddings=True, attention_bias=True, dtype="bfloat16"
    )
    return export_graph(config, max_seq_len=512).model


@pytest.fixture(scope="module")
def exported_gemma3() -> Exported:
    """Per-layer windows and frequencies, head norms after the transpose."""
    config = transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 2},
        head_dim=24,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )
    return export_graph(config, max_seq_len=512)


@pytest.fixture(scope="module")
def gemma3(exported_gemma3: Exported) -> ir.Model:
    return exported_gemma3.model


def _operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def _attention(model: ir.Model) -> list[dict[str, int | float]]:
    nodes = [node for node in model.graph if node.op_type == "PagedAttention"]
    return [{name: attribute.value for name, attribute in node.attributes.items()} for node in nodes]


def test_what_was_rewritten_is_counted(exported_gemma3):
    fired = {name: report.matched for name, report in exported_gemma3.rewrites.items() if report.matched}
    del fired["merge_reshapes"]
    assert fired == {
        "gather_rows": 1,
        "rms_norm": 13,  # six in each layer, and the last one
        "normalize_before_transpose": 4,
        "rope": 4,
        "rope_packed": 4,
    }
    assert not any(report.declined for report in exported_gemma3.rewrites.values())


def test_the_graph_as_it_was_exported_is_kept_beside_it(exported_gemma3):
    assert exported_gemma3.raw.graph.num_nodes() == exported_gemma3.raw_nodes > 4 * len(exported_gemma3.model.graph)
    assert "RMSNormalization" not in _operators(exported_gemma3.raw)


def test_every_parameter_is_a_trailing_input_under_its_own_name(llama):
    config = transformers.LlamaConfig(
        **{**SIZES, "num_hidden_layers": 2}, tie_word_embeddings=True, attention_bias=True
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = [value.name for value in llama.graph.inputs]
    assert names[:3] == ["input_ids", "position_ids", "logits_rows"]
    assert {value.name: tuple(value.shape) for value in llama.graph.inputs[3:]} == expected


def test_tied_head_appears_once_under_the_embeddings_name(llama):
    names = [value.name for value in llama.graph.inputs]
    assert names.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names
    (embedding,) = (value for value in llama.graph.inputs if value.name == "model.embed_tokens.weight")
    assert sorted(node.op_type for node, _ in embedding.uses()) == ["Gather", "Transpose"]


def test_parameters_are_float32_even_if_the_checkpoint_is_not(llama):
    assert {value.dtype for value in llama.graph.inputs[3:]} == {ir.DataType.FLOAT}


def test_graph_holds_no_weights(llama):
    assert sum(value.const_value.nbytes for value in llama.graph.initializers.values()) < 1024
    assert len(ir.to_proto(llama).SerializeToString()) < 64_000


def test_linear_layers_are_products_with_the_transposed_parameter(llama):
    products = [node for node in llama.graph if node.op_type == "MatMul"]
    assert len(products) == 2 * 7 + 1
    for node in products:
        transpose = node.inputs[1].producer()
        assert transpose.op_type == "Transpose"
        assert list(transpose.attributes["perm"].value) == [1, 0]
        assert transpose.inputs[0].is_graph_input()
    assert "Gemm" not in _operators(llama)


def test_biases_are_added_after_the_product(llama):
    (bias,) = (value for value in llama.graph.inputs if value.name == "model.layers.0.self_attn.q_proj.bias")
    ((add, _),) = bias.uses()
    assert add.op_type == "Add"
    assert add.inputs[0].producer().name == "model.layers.0.self_attn.q_proj/MatMul"


def test_norms_and_rotary_embedding_are_single_operators(llama, gemma3):
    assert _operators(llama)["RMSNormalization"] == 2 * 2 + 1
    assert _operators(gemma3)["RMSNormalization"] == 2 * 6 + 1
    for model in (llama, gemma3):
        operators = _operators(model)
        assert operators["RotaryEmbedding"] == 2 * 2
        assert not {"Pow", "ReduceMean", "Sqrt", "Reciprocal", "Neg", "Slice", "GatherND"} & operators.keys()
        # What is left transposes parameters, never activations.
        assert operators["Transpose"] == operators["MatMul"]


def test_rotary_tables_are_computed_once_per_base_not_per_layer(llama, gemma3):
    assert (_operators(llama)["Cos"], _operators(llama)["Sin"]) == (1, 1)
    assert (_operators(gemma3)["Cos"], _operators(gemma3)["Sin"]) == (2, 2)


def test_attention_carries_each_layers_own_numbers(llama, gemma3):
    plain = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25, "window": 0, "softcap": 0.0}
    assert _attention(llama) == [{"layer": 0, **plain}, {"layer": 1, **plain}]
    assert [(layer["layer"], layer["window"]) for layer in _attention(gemma3)] == [(0, 16), (1, 0)]


def test_names_say_which_module_a_node_comes_from(llama):
    names = {node.name for node in llama.graph}
    assert len(names) == len(llama.graph)
    assert {
        "model.embed_tokens/Gather",
        "model.layers.1.self_attn/PagedAttention",
        "model.layers.1.mlp.down_proj/MatMul",
        "model.norm/RMSNormalization",
        "lm_head/MatMul",
    } <= names
    assert all(node.outputs[0].name in (node.name, "logits") for node in llama.graph)
    assert not any(node.metadata_props for node in llama.graph)


def test_export_obeys_the_dialect(llama, gemma3):
    assert verify_graph(llama) == []
    assert verify_graph(gemma3) == []


def test_export_needs_no_memory_for_weights_and_prints_nothing(capfd):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = transformers.LlamaConfig(
        **{**SIZES, "hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 65536, "num_attention_heads": 128}
    )
    model = export_graph(config, max_seq_len=512).model
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    weights = sum(math.prod(value.shape) * 4 for value in model.graph.inputs[3:])
    assert weights > 8e9
    assert grown_mb < 300
    assert capfd.readouterr() == ("", "")


def test_refusals_inside_the_models_code_reach_the_user_in_one_line():
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=24, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModelError) as caught:
        export_checked(config)
    assert str(caught.value) == ("Gemma3ForCausalLM: Gemma3Attention of layer 0: attention is not causal")


def test_an_untested_architecture_is_exported_when_asked_for():
    config = transformers.GemmaConfig(**SIZES, head_dim=24)
    with pytest.raises(UnsupportedModelError, match="not a tested architecture"):
        export_graph(config, max_seq_len=512)
    assert verify_graph(export_graph(config, max_seq_len=512, allow_untested=True).model) == []
