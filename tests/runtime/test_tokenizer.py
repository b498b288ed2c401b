"""Text to ids and back: the tokenizer's own settings hold, strange text is refused in words or handled."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from optimc.errors import PlanError, RequestError
from optimc.plan import (
    FORMAT_VERSION,
    KvLayer,
    KvLayout,
    Limits,
    Manifest,
    ModelInfo,
    Plan,
    PlanTensor,
    Source,
    TargetInfo,
    TokenIds,
    write_plan,
)
from optimc_runtime.chat_template import ChatTemplate
from optimc_runtime.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def backend_of(*, adds_bos: bool = False) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    backend.add_tokens([AddedToken("<think>", special=False)])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def tokenizer_of(*, adds_bos: bool = False) -> Tokenizer:
    return Tokenizer(backend_of(adds_bos=adds_bos).to_str().encode(), SPECIAL)


def write_test_plan(path: Path, blobs: dict[str, bytes]) -> Plan:
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name="test",
        target=TargetInfo(backend="none"),
        model=ModelInfo(architecture="none", vocab_size=400, hidden_size=8, num_layers=1),
        limits=Limits(max_seq_len=8, max_step_tokens=8, max_seqs=1, kv_memory_bytes=1024),
        kv=KvLayout(block_size=4, dtype="float32", layers=(KvLayer(num_kv_heads=1, head_dim=8, window=0),)),
        tokens=TokenIds(bos=0, eos=(1,), pad=None),
        source=Source(
            model="m", model_hash="", recipe={}, recipe_hash="", calibration_hash=None, build_key="", tools={}
        ),
    )
    write_plan(path, manifest, [PlanTensor.from_bytes(name, data) for name, data in blobs.items()])
    return Plan.open(path)


def test_a_plan_carries_tokenizer_special_tokens_and_template(tmp_path: Path) -> None:
    blobs = {
        "tokenizer/tokenizer.json": backend_of().to_str().encode(),
        "tokenizer/special_tokens.json": json.dumps(SPECIAL).encode(),
        "tokenizer/chat_template.jinja": b"{{ bos_token }}{{ messages[0].content }}",
    }
    plan = write_test_plan(tmp_path / "full.plan", blobs)
    tokenizer = Tokenizer.from_plan(plan)
    template = ChatTemplate.from_plan(plan)
    assert tokenizer is not None
    assert template is not None
    assert tokenizer.special_tokens == SPECIAL
    assert template.encode(tokenizer, [{"role": "user", "content": "fox"}]) == [0, *tokenizer.encode("fox")]
    other = ChatTemplate.from_plan(plan, source="{{ messages[0].content }}{{ eos_token }}")
    assert other is not None
    assert other.render([{"role": "user", "content": "fox"}]) == "fox</s>"


def test_a_plan_may_carry_none_of_them(tmp_path: Path) -> None:
    plan = write_test_plan(tmp_path / "bare.plan", {"weights/w": b"w"})
    assert Tokenizer.from_plan(plan) is None
    assert ChatTemplate.from_plan(plan) is None
    plan = write_test_plan(tmp_path / "base.plan", {"tokenizer/tokenizer.json": backend_of().to_str().encode()})
    tokenizer = Tokenizer.from_plan(plan)
    assert tokenizer is not None
    assert tokenizer.special_tokens == {}
    assert tokenizer.bos_id is None
    assert not tokenizer.adds_bos


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", b"\xff\xfe", b'{"model": {"type": "Nonsense"}}'])
def test_a_file_that_is_no_tokenizer_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(PlanError, match=r"tokenizer\.json is not one"):
        Tokenizer(data)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_raw_text_follows_the_tokenizers_own_setting(adds_bos: bool) -> None:
    tokenizer = tokenizer_of(adds_bos=adds_bos)
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == ([0, *plain] if adds_bos else plain)
    assert tokenizer.adds_bos is adds_bos
    assert tokenizer.bos_id == 0


def test_ids_and_texts_round_trip_and_special_tokens_can_be_shown() -> None:
    tokenizer = tokenizer_of()
    text = "the\x00 fox \u200b\r\n 😀 \ufffd"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("fox</s>dog<|im_end|>")
    assert 1 in ids
    assert tokenizer.decode(ids) == "foxdog"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "fox</s>dog<|im_end|>"
    assert tokenizer.decode([99999]) == ""


def test_special_ids_are_the_control_tokens_only() -> None:
    tokenizer = tokenizer_of()
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_id("<think>") == tokenizer.vocab_size - 1
    assert tokenizer.token_id("no such token") is None


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "😀\ud83d"])
def test_lone_surrogates_are_refused_naming_the_place(text: str) -> None:
    with pytest.raises(RequestError, match="lone surrogate .* at character"):
        tokenizer_of().encode(text)


def test_truncation_and_padding_settings_in_the_file_are_ignored() -> None:
    backend = backend_of()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer(backend.to_str().encode())
    assert tokenizer.encode("the quick brown fox jumps") == tokenizer_of().encode("the quick brown fox jumps")
    assert tokenizer.encode("the quick brown fox " * 20) == tokenizer_of().encode("the quick brown fox " * 20)


def test_pieces_are_the_bytes_of_the_text() -> None:
    tokenizer = tokenizer_of()
    ids = tokenizer.encode("the 😀 <think> fox")
    assert b"".join(tokenizer.pieces.bytes_of(token_id) for token_id in ids) == "the 😀 <think> fox".encode()
    assert tokenizer.pieces.bytes_of(99999) == b""


def test_threads_do_not_disturb_each_other() -> None:
    tokenizer = tokenizer_of(adds_bos=True)
    texts = [f"the {n} quick foxes" + " jump" * n for n in range(50)]
    want = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(tokenizer.encode, texts)) == want
            assert list(pool.map(tokenizer.decode, want)) == texts
