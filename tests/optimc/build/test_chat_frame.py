"""What stands around a user's turn, and templates that have no such place."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from optimc.build.chat_frame import chat_frame_of
from optimc_runtime.tokenizer import Tokenizer as ServedTokenizer

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>"]


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(SPECIALS)
    return ServedTokenizer(backend.to_str().encode(), {"bos_token": "<s>"})


def text(tokenizer, ids):
    names = {index: token for token, index in json.loads(tokenizer._backend.to_str())["model"]["vocab"].items()}
    names |= {tokenizer.token_id(special): special for special in SPECIALS}
    return "".join(names[index] for index in ids).replace("Ċ", "\n").replace("Ġ", " ")


def test_smollm2_writes_a_system_prompt_before_the_user_and_ends_the_turn_with_a_control_token(tokenizer):
    frame = chat_frame_of(SMOLLM2, tokenizer, {})
    assert text(tokenizer, frame.before_user) == (
        "<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n<|im_start|>user\n"
    )
    assert text(tokenizer, frame.after_user) == "<|im_end|>\n<|im_start|>assistant\n"
    assert frame.user_stop_ids == {tokenizer.token_id("<|im_end|>")}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('system first') }}", "system first"),
        ("{% for", "chat template, line 1"),
        ("{{ bos_token }}", "writes a user's text 0 times"),
        ("{{ messages[0]['content'] + messages[0]['content'] }}", "writes a user's text 2 times"),
        ("{{ messages[0]['content'] }}<|im_end|>", "nothing before a user's text"),
        ("User: {{ messages[0]['content'] }}\nAssistant:", "ends a user's text with no control token"),
    ],
)
def test_templates_that_leave_no_place_are_told_in_words(tokenizer, template, reason):
    found = chat_frame_of(template, tokenizer, {})
    assert isinstance(found, str)
    assert reason in found


def test_without_a_tokenizer_there_is_no_chat():
    assert chat_frame_of(SMOLLM2, None, {}) == "the checkpoint has no tokenizer"
