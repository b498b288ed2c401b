"""Streamed text equals the one-shot decoding, whatever the tokens and however they were cut."""

import json
import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from optimc_runtime.detokenize import Detokenizer
from optimc_runtime.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. She sells sea shells, doesn't she?",
    "नमस्ते दुनिया, यह एक परीक्षण है",
    "สวัสดีชาวโลก นี่คือการทดสอบ",
    "Größe, naïve, café, \u0041\u030a\u0301 and z\u0335\u0336",
    "👩‍👩‍👧‍👦 🇩🇪🇫🇷🇯🇵 👍🏽 😀 text 😀",
    "你好，世界。こんにちは",
] * 3

TEXTS = [
    *dict.fromkeys(CORPUS),
    "family 👩‍👩‍👧‍👦👨‍👨‍👦 and flags 🇧🇷🇮🇳🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "a text that really contains \ufffd and \ufffd\ufffd in it\ufffd",
    "  leading and  double   spaces  ",
    " one leading space",
    "line\r\nbreaks\r\n\r\nand\ttabs\n",
    "combining e\u0301\u0302\u0303 o\u0308 ",
    "nul \x00 and bell \x07",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 ꙮ",
    "",
]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|end|>", "<|start of turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["→ plain added", "    "])
    return backend


def with_byte_tokens(backend: Backend, decoder: decoders.Decoder) -> Backend:
    """Make the byte tokens, which were trained in as special ones, ordinary vocabulary."""
    backend.decoder = decoder
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    return Backend.from_str(json.dumps(spec))


ASCII = [*map(chr, range(0x21, 0x7F)), "▁"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def llama_like() -> Backend:
    """BPE over spaces spelled U+2581 with byte fallback, decoded by the usual four steps."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", *BYTES],
        show_progress=False,
        initial_alphabet=ASCII,
        limit_alphabet=len(ASCII),
    )
    backend.train_from_iterator(CORPUS, trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return with_byte_tokens(backend, decoders.Sequence(steps))


def unigram() -> Backend:
    """SentencePiece-style Unigram, decoded by Metaspace alone."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_piece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def suffix_bpe() -> Backend:
    backend = Backend(models.BPE(end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_level_then_strip() -> Backend:
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return backend


def no_decoder() -> Backend:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "c": 2, "<s>": 3}, unk_token="c"))
    backend.add_special_tokens(["<s>"])
    return backend


FAMILIES: dict[str, Callable[[], Backend]] = {
    make.__name__: make
    for make in (byte_level, llama_like, unigram, word_piece, suffix_bpe, byte_level_then_strip, no_decoder)
}


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(FAMILIES[request.param]().to_str().encode())


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level().to_str().encode())


@pytest.fixture(scope="module")
def fallback_tokenizer() -> Tokenizer:
    return Tokenizer(llama_like().to_str().encode())


def streamed(tokenizer: Tokenizer, ids: list[int], rng: random.Random, *, skip: bool = True) -> list[str]:
    """Push `ids` in increments of random size; return the deltas, the flushed rest last."""
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    deltas, at = [], 0
    while at < len(ids):
        size = rng.choice([0, 1, 1, 1, 2, 7])
        deltas.append(stream.push(ids[at : at + size]))
        at += size
    return [*deltas, stream.flush()]


@pytest.mark.parametrize("skip", [True, False])
def test_increments_join_to_the_decoding_of_2000_random_sequences(tokenizer: Tokenizer, skip: bool) -> None:
    rng = random.Random(0)
    beyond = tokenizer.vocab_size + 5
    for _ in range(2000):
        ids = [rng.randrange(beyond) for _ in range(rng.randrange(40))]
        deltas = streamed(tokenizer, ids, rng, skip=skip)
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_increments_join_to_the_decoding_of_random_bytes(
    byte_tokenizer: Tokenizer, fallback_tokenizer: Tokenizer
) -> None:
    """Bytes near those that begin, continue and break UTF-8 sequences, which random ids rarely line up."""
    rng = random.Random(1)
    telling = [0x20, 0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC1, 0xC3, 0xE0, 0xE2, 0xED, 0xEF, 0xF0, 0x9F, 0x98, 0xF4, 0xF5]
    for tokenizer in (byte_tokenizer, fallback_tokenizer):
        by_byte: dict[int, int] = {}
        for token_id in range(tokenizer.vocab_size):
            raw = tokenizer.pieces.bytes_of(token_id)
            if len(raw) == 1:
                by_byte.setdefault(raw[0], token_id)
        for _ in range(2000):
            ids = [by_byte[rng.choice(telling)] for _ in range(rng.randrange(1, 12))]
            assert "".join(streamed(tokenizer, ids, rng)) == tokenizer.decode(ids), ids


@pytest.mark.parametrize("text", TEXTS)
def test_real_text_survives_every_cut(tokenizer: Tokenizer, text: str) -> None:
    """Cut anywhere, as max_tokens does, even inside an emoji."""
    ids = tokenizer.encode(text)
    for length in range(len(ids) + 1):
        deltas = streamed(tokenizer, ids[:length], random.Random(length))
        assert "".join(deltas) == tokenizer.decode(ids[:length])


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_comes_back_whole_and_no_increment_holds_half_a_character(
    byte_tokenizer: Tokenizer, text: str
) -> None:
    ids = byte_tokenizer.encode(text)
    deltas = streamed(byte_tokenizer, ids, random.Random(2))
    assert "".join(deltas) == text
    assert "".join(deltas).count("\ufffd") == text.count("\ufffd")
    assert deltas[-1] == "", "whole characters are never held back"


def test_an_emoji_comes_out_once_complete_and_as_one_replacement_if_cut(byte_tokenizer: Tokenizer) -> None:
    pieces = byte_tokenizer.pieces
    by_byte = {pieces.bytes_of(i): i for i in range(byte_tokenizer.vocab_size)}
    ids = [by_byte[bytes([byte])] for byte in "🦊".encode()]
    stream = Detokenizer(byte_tokenizer)
    assert [stream.push([token_id]) for token_id in ids] == ["", "", "", "🦊"]
    cut = Detokenizer(byte_tokenizer)
    assert (cut.push(ids[:3]), cut.flush()) == ("", "\ufffd")


def test_a_run_of_fallback_bytes_waits_for_its_end(fallback_tokenizer: Tokenizer) -> None:
    ids = fallback_tokenizer.encode("x🦊 y")
    stream = Detokenizer(fallback_tokenizer)
    deltas = [stream.push([token_id]) for token_id in ids]
    assert "".join(deltas) == "x🦊 y"
    assert all("\ufffd" not in delta for delta in deltas)


def test_special_tokens_are_skipped_or_kept(byte_tokenizer: Tokenizer) -> None:
    ids = [*byte_tokenizer.encode("a b"), 1, *byte_tokenizer.encode("c"), 0]
    assert "".join(streamed(byte_tokenizer, ids, random.Random(0))) == "a bc"
    kept = "".join(streamed(byte_tokenizer, ids, random.Random(0), skip=False))
    assert kept == "a b<|start of turn|>c<|end|>"


def test_what_tokens_say_is_remembered_for_so_many_of_them_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimc_runtime.token_pieces.MAX_KEPT_TEXTS", 16)
    pieces = Tokenizer(byte_level().to_str().encode()).pieces
    first, again = ([pieces.text_of(token_id) for token_id in range(700)] for _ in range(2))
    assert first == again
    assert len(pieces._texts) <= 16


@pytest.mark.parametrize("family", ["byte_level", "llama_like"])
def test_work_is_linear_in_the_number_of_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(FAMILIES[family]().to_str().encode())
    work = 0
    decode, bytes_of = Tokenizer.decode, type(tokenizer.pieces).bytes_of

    def counted_decode(self: Tokenizer, ids: list[int], **options: bool) -> str:
        nonlocal work
        work += len(ids)
        return decode(self, ids, **options)

    def counted_bytes(self: object, token_id: int) -> bytes:
        nonlocal work
        work += 1
        return bytes_of(self, token_id)

    monkeypatch.setattr(Tokenizer, "decode", counted_decode)
    monkeypatch.setattr(type(tokenizer.pieces), "bytes_of", counted_bytes)
    counts = []
    for length in (2000, 4000):
        ids = (tokenizer.encode(" ".join(CORPUS)) * 40)[:length]
        work = 0
        streamed(tokenizer, ids, random.Random(0))
        counts.append(work)
    assert counts[1] < 2.1 * counts[0]
    assert counts[1] < 8 * 4000
