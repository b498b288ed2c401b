"""Medusa heads as a graph for TensorRT compute what `heads/reference.py` says.

Letters: N rows to draft for, K heads, d hidden size, V vocabulary, V' draft vocabulary.
"""

import numpy as np
import onnx_ir as ir
import pytest

from optimc.errors import LoweringError
from optimc_passes.emit.tensorrt.heads_graph import heads_graph
from optimc_passes.graph.attach import attach_weights
from optimc_passes.heads.reference import head_logits
from optimc_passes.heads.root_embedding import root_embedding
from optimc_passes.weights import Quantized

HALF = 2e-3
"""Of the largest logit: float16 rounds by at most 5e-4, each block three times."""
EXACT = 1e-5


class Drafting:
    """A decoder's graph with heads, some of it quantized."""

    def __init__(self, tiny_decoder, heads_tests, *, quantized=None, tied=True, names=(), **options):
        self.heads_tests = heads_tests
        decoder = tiny_decoder(vocab=heads_tests.VOCAB, hidden=heads_tests.HIDDEN, tied=tied)
        store = decoder.store.replace({name: quantized(decoder.arrays[name]) for name in names})
        self.model = attach_weights(decoder.model, store)
        head = store["model.embed_tokens.weight" if tied else "lm_head.weight"]
        self.output_head = head.dequantize() if isinstance(head, Quantized) else head.read()
        self.heads = heads_tests.make_heads(quantized, output_head=head, **options)

    def error(self, run, rows=5):
        """Largest error of the logits of some rows, relative to the largest logit."""
        rng = np.random.default_rng(rows)
        hidden = rng.standard_normal((rows, self.heads_tests.HIDDEN)).astype(np.float32)
        tokens = rng.integers(0, self.heads_tests.VOCAB, rows)
        embedded = root_embedding(self.model, tokens) if self.heads.info.conditioned else None
        expected = head_logits(self.heads, self.output_head, hidden, embedded)
        graph = heads_graph(self.heads, self.model, precision="float16")
        found = run(graph, {"hidden": hidden, "tokens": tokens})["logits"]
        assert found.dtype == np.float32
        assert found.shape == expected.shape
        return np.abs(found - expected).max() / np.abs(expected).max()


VARIANTS = (
    "conditioned-shared-whole",
    "plain-shared-whole",
    "conditioned-shared-part",
    "plain-own-part",
    "conditioned-own-whole-deep",
    "plain-shared-part-deep",
    "one-head",
)


def test_every_variant_is_tried(heads_tests):
    assert set(VARIANTS) == set(heads_tests.VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_draft_is_what_numpy_says(tiny_decoder, heads_tests, run, variant):
    drafting = Drafting(tiny_decoder, heads_tests, **heads_tests.VARIANTS[variant])
    for rows in (1, 7):
        assert drafting.error(run, rows) < HALF


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("variant", VARIANTS)
def test_in_float32_nothing_is_lost(tiny_decoder, heads_tests, run, variant):
    assert Drafting(tiny_decoder, heads_tests, **heads_tests.VARIANTS[variant]).error(run) < EXACT


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("variant", ["conditioned-shared-whole", "conditioned-shared-part", "plain-shared-part-deep"])
@pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (4, False)])
def test_heads_in_codes_multiply_as_they_did(tiny_decoder, heads_tests, quantized, run, variant, bits, symmetric):
    rounded = lambda array: quantized(array, bits=bits, group=16, symmetric=symmetric)  # noqa: E731
    options = {"names": ["model.embed_tokens.weight"], **heads_tests.VARIANTS[variant]}
    drafting = Drafting(tiny_decoder, heads_tests, quantized=rounded, **options)
    assert drafting.error(run) < EXACT
    graph = heads_graph(drafting.heads, drafting.model, precision="float16").graph
    codes = ir.DataType.INT8 if bits == 8 else ir.DataType.INT4
    assert {node.inputs[0].dtype for node in graph if node.op_type == "DequantizeLinear"} == {codes}


@pytest.mark.usefixtures("in_float32")
def test_a_head_in_an_order_of_its_own_is_shared(tiny_decoder, heads_tests, quantized, run):
    order = np.random.default_rng(6).permutation(heads_tests.HIDDEN).astype(np.int32)
    rounded = lambda array: (  # noqa: E731
        quantized(array, bits=8, group=16, permutation=order if array.shape[1] == heads_tests.HIDDEN else None)
    )
    options = {"quantized": rounded, "tied": False, "names": ["lm_head.weight"], "conditioned": False}
    assert Drafting(tiny_decoder, heads_tests, **options).error(run) < EXACT


def test_inputs_are_those_heads_read(tiny_decoder, heads_tests):
    for variant, names in (("conditioned-shared-whole", ["hidden", "tokens"]), ("plain-shared-whole", ["hidden"])):
        drafting = Drafting(tiny_decoder, heads_tests, **heads_tests.VARIANTS[variant])
        graph = heads_graph(drafting.heads, drafting.model, precision="float16").graph
        assert [value.name for value in graph.inputs] == names
        assert all(value.uses() for value in graph.inputs)


def test_heads_of_another_model_are_refused(tiny_decoder, heads_tests):
    decoder = tiny_decoder(hidden=64)
    with pytest.raises(LoweringError, match="hidden states of 48, the model's output head reads 64"):
        heads_graph(heads_tests.make_heads(), attach_weights(decoder.model, decoder.store), precision="float16")
