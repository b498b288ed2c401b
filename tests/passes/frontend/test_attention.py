import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from optimc.errors import UnsupportedModelError
from optimc_passes.frontend.attention import ATTENTION_NAME, paged_attention_registered


class Layer(torch.nn.Module):
    def __init__(self, layer_idx: int | None = 3, is_causal: bool = True) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.is_causal = is_causal


@pytest.fixture
def interface():
    with paged_attention_registered():
        yield ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME], ALL_MASK_ATTENTION_FUNCTIONS[ATTENTION_NAME]


def _heads(heads: int = 2, tokens: int = 5, width: int = 8) -> torch.Tensor:
    return torch.zeros(1, heads, tokens, width)


def test_registration_ends_with_the_block():
    with paged_attention_registered():
        assert ATTENTION_NAME in ALL_ATTENTION_FUNCTIONS
    assert ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS
    assert ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS


def test_registration_ends_when_the_block_fails():
    with pytest.raises(KeyError), paged_attention_registered():
        raise KeyError
    assert ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS


def test_heads_come_back_packed_by_token(interface):
    attend, _ = interface
    out, weights = attend(Layer(), _heads(4), _heads(), _heads(), None, scaling=0.5, dropout=0.1, position_ids=1)
    assert out.shape == (1, 5, 4, 8)
    assert weights is None


@pytest.mark.parametrize(
    ("layer", "arguments", "missing"),
    [
        (Layer(), {"s_aux": torch.zeros(2)}, "attention uses s_aux"),
        (Layer(), {"head_mask": 1, "position_bias": 1}, "attention uses head_mask, position_bias"),
        (Layer(), {"is_causal": False}, "not causal"),
        (Layer(is_causal=False), {}, "not causal"),
        (Layer(layer_idx=None), {}, "does not know its layer index"),
    ],
)
def test_refuses_what_the_node_cannot_express(interface, layer, arguments, missing):
    attend, _ = interface
    with pytest.raises(UnsupportedModelError, match=missing):
        attend(layer, _heads(), _heads(), _heads(), None, scaling=1.0, **arguments)


def test_refusals_name_the_layer(interface):
    attend, _ = interface
    with pytest.raises(UnsupportedModelError, match=r"^Layer of layer 3: "):
        attend(Layer(), _heads(), _heads(), _heads(), None, s_aux=1)


def test_refuses_cross_attention_and_unequal_heads(interface):
    attend, _ = interface
    with pytest.raises(UnsupportedModelError, match="different sequences"):
        attend(Layer(), _heads(), _heads(tokens=6), _heads(tokens=6), None)
    with pytest.raises(UnsupportedModelError, match="have 8, 8 and 4 channels"):
        attend(Layer(), _heads(), _heads(), _heads(width=4), None)


def test_window_of_mask_and_call_must_agree(interface):
    attend, describe_mask = interface
    windowed = describe_mask(device="cpu", local_size=7, q_length=5)
    attend(Layer(), _heads(), _heads(), _heads(), windowed, sliding_window=7)
    with pytest.raises(UnsupportedModelError, match=r"mask has a window of 7 tokens, the attention call says 0"):
        attend(Layer(), _heads(), _heads(), _heads(), windowed)
    with pytest.raises(UnsupportedModelError, match=r"mask has a window of 0 tokens, the attention call says 7"):
        attend(Layer(), _heads(), _heads(), _heads(), describe_mask(device="cpu"), sliding_window=7)


@pytest.mark.parametrize("made_with", [{"use_vmap": True}, {"allow_is_bidirectional_skip": False}])
def test_refuses_masks_that_are_neither_causal_nor_windows(interface, made_with):
    attend, describe_mask = interface
    for mask in (describe_mask(device="cpu", **made_with), torch.zeros(1, 1, 5, 5)):
        with pytest.raises(UnsupportedModelError, match="neither causal nor a causal window"):
            attend(Layer(), _heads(), _heads(), _heads(), mask)
