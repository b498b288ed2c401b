import numpy as np
import pytest

from optimc.errors import RequestError
from optimc_runtime.admission import check_prompt, check_stops, output_limit
from optimc_runtime.config import StepLimits
from optimc_runtime.request import SamplingParams

SMALL_POOL = StepLimits(max_seq_len=64, max_step_tokens=8, max_seqs=8, block_size=4, num_blocks=8)
LARGE_POOL = StepLimits(max_seq_len=64, max_step_tokens=8, max_seqs=8, block_size=4, num_blocks=99)


def refused(call) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("limits", [SMALL_POOL, LARGE_POOL])
def test_what_cannot_run_alone_is_refused(limits):
    most = limits.max_request_tokens
    for length in (31, 32, 33, 63, 64, 65):
        prompt = [1] * length
        if length > most:
            error = refused(lambda prompt=prompt: check_prompt(prompt, 64, limits, chunked_prefill=True))
            assert error.param == "prompt"
            assert error.code == "context_length_exceeded"
        else:
            assert len(check_prompt(prompt, 64, limits, chunked_prefill=True)) == length
        if length < most:
            assert output_limit(length, SamplingParams(), limits) == most - length
            assert output_limit(length, SamplingParams(max_tokens=most - length), limits) == most - length
            too_many = SamplingParams(max_tokens=most - length + 1)
            assert refused(lambda n=length, p=too_many: output_limit(n, p, limits)).param == "max_tokens"
        elif length == most:
            assert refused(lambda n=length: output_limit(n, SamplingParams(), limits)).param == "prompt"
            assert output_limit(length, SamplingParams(max_tokens=0), limits) == 0
        assert refused(lambda n=length: output_limit(n, SamplingParams(max_tokens=10_000), limits))


def test_the_message_says_which_limit_with_numbers():
    error = refused(lambda: output_limit(31, SamplingParams(max_tokens=10_000), SMALL_POOL))
    assert str(error) == (
        "the prompt (31 tokens) and max_tokens (10,000) make 10,031 tokens; the limit is 32 tokens for prompt plus "
        "output (KV pool of 8 blocks x 4 tokens)"
    )
    error = refused(lambda: check_prompt([1] * 65, 64, LARGE_POOL, chunked_prefill=True))
    assert str(error) == "the prompt has 65 tokens; the limit is 64 tokens for prompt plus output"


@pytest.mark.parametrize("prompt", [[[1, 2]], [[1], [2, 3]], [1.5], ["a"], [True], [10**30], [None]])
def test_a_prompt_that_is_no_list_of_ids_is_refused(prompt):
    assert "flat list of token ids" in str(refused(lambda: check_prompt(prompt, 64, LARGE_POOL, chunked_prefill=True)))


def test_empty_prompts_and_foreign_ids_are_refused():
    assert "empty" in str(refused(lambda: check_prompt([], 64, LARGE_POOL, chunked_prefill=True)))
    for token in (-1, 64):
        message = str(refused(lambda token=token: check_prompt([1, token], 64, LARGE_POOL, chunked_prefill=True)))
        assert message == f"prompt: token id {token} is outside the vocabulary of 64"


def test_without_chunking_a_prompt_longer_than_a_step_is_refused():
    assert len(check_prompt([1] * 8, 64, LARGE_POOL, chunked_prefill=False)) == 8
    assert "max_step_tokens" in str(refused(lambda: check_prompt([1] * 9, 64, LARGE_POOL, chunked_prefill=False)))


def test_more_min_tokens_than_can_be_generated_are_refused():
    params = SamplingParams(max_tokens=3, min_tokens=4)
    assert refused(lambda: output_limit(1, params, LARGE_POOL)).param == "min_tokens"


def test_an_array_is_a_prompt_too():
    assert check_prompt(np.array([1, 2], np.int32), 64, LARGE_POOL, chunked_prefill=True).tolist() == [1, 2]


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_what_contradicts_a_grammar_is_refused(options):
    with pytest.raises(RequestError, match="says where the answer ends") as refusal:
        check_stops(SamplingParams(**options), 64, has_tokenizer=True, has_grammar=True)
    assert refusal.value.param in options
    check_stops(SamplingParams(**options), 64, has_tokenizer=True, has_grammar=False)
    fitting = SamplingParams(max_tokens=9, stop=("a",), stop_token_ids=(3,))
    check_stops(fitting, 64, has_tokenizer=True, has_grammar=True)
