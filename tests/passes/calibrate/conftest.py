"""A small byte-level tokenizer, with and without BOS."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from optimc_passes.calibrate.python_docs import calibration_texts


def make_tokenizer(*, bos: bool, eos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(calibration_texts()[:3], trainer)
    single = f"{'<|bos|> ' if bos else ''}$A{' <|eos|>' if eos else ''}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def plain() -> Tokenizer:
    """Puts nothing around a text."""
    return make_tokenizer(bos=False)


@pytest.fixture(scope="session")
def with_bos() -> Tokenizer:
    """Puts BOS (id 0) before a text and EOS (id 1) after it."""
    return make_tokenizer(bos=True, eos=True)


@pytest.fixture(scope="session")
def plain_json(plain: Tokenizer) -> bytes:
    return plain.to_str().encode()


@pytest.fixture(scope="session")
def with_bos_json(with_bos: Tokenizer) -> bytes:
    return with_bos.to_str().encode()
