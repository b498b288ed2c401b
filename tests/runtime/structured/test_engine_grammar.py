"""Answers of an engine keep to their grammar, whatever the logits, the guesses and the company."""

import json

import jsonschema
import numpy as np
import pytest

from optimc.errors import RequestError
from optimc_runtime.request import SamplingParams
from optimc_runtime.structured.grammar import Grammar
from optimc_runtime.structured.grammar_spec import GrammarSpec

END = 256
WIDE = {"vocab_size": 257, "eos": (END,), "max_seq_len": 512, "max_step_tokens": 256, "num_blocks": 1200}

SCHEMAS = {
    "flat": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"enum": ["x", 1]}},
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {"p": {"type": "object", "properties": {"q": {"enum": [1, 2]}}, "required": ["q"]}},
        "required": ["p"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["s"]}], "items": False, "minItems": 2},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {}, "additionalProperties": False}]},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,5}$"},
    "range": {"type": "integer", "minimum": -20, "maximum": 300},
    "const": {"const": {"k": [1, None, "v"]}},
    "date": {"type": "string", "format": "date"},
    "recursive": {
        "$defs": {"node": {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}, "v": {"type": "boolean"}},
                           "required": ["v"], "additionalProperties": False}},
        "$ref": "#/$defs/node",
    },
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
}  # fmt: skip


def spec_of(schema) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), "response_format")


@pytest.fixture
def answers(make_engine, drive, byte_tokenizer):
    """Answer prompts on a new engine and return the inboxes, with one grammar for all or one each."""

    def run(specs, params, *, config=None, speculator=None, prompts=None, **options):
        engine = make_engine(config, speculator=speculator, tokenizer=byte_tokenizer, **{**WIDE, **options})
        each = params if isinstance(params, list) else [params] * len(specs)
        inboxes = []
        for index, (spec, mine) in enumerate(zip(specs, each, strict=True)):
            grammar = engine.compile_grammar(spec) if isinstance(spec, GrammarSpec) else spec
            prompt = prompts[index] if prompts else [7, index]
            inboxes.append(drive.submit(engine, prompt, mine, grammar=grammar, request_id=f"r{index}"))
        drive.run(engine)
        run.engine = engine
        return inboxes

    return run


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_ends_by_itself_is_valid_whatever_the_logits(answers, name):
    schema = SCHEMAS[name]
    params = [SamplingParams(max_tokens=200, temperature=1.0, seed=seed) for seed in range(12)]
    finished = [inbox.text for inbox in answers([spec_of(schema)] * 12, params) if inbox.reason == "stop"]
    assert len(finished) >= 6
    for text in finished:
        jsonschema.validate(json.loads(text), schema)
    assert len(set(finished)) > 1 or name == "const", "choices have states of their own"


def test_greedy_answers_keep_to_a_regex_and_end_where_nothing_can_follow(answers):
    [inbox] = answers([GrammarSpec("regex", "[0-9]{4}-[0-9]{2}", "guided_regex")], SamplingParams(temperature=0))
    assert inbox.reason == "stop"
    assert len(inbox.text) == len(inbox.token_ids) == 7, "no step is spent on the end that is certain"
    assert inbox.text[4] == "-"
    assert (inbox.text[:4] + inbox.text[5:]).isdecimal()


def test_the_end_may_be_chosen_where_the_grammar_lets_it(answers):
    spec = GrammarSpec("regex", "[ab]{3,200}", "guided_regex")
    [inbox] = answers([spec], SamplingParams(temperature=0, logit_bias={END: 100}))
    assert inbox.token_ids[3:] == [END]
    assert inbox.reason == "stop"
    assert len(inbox.text) == 3


def test_limits_and_stop_strings_cut_as_ever(answers):
    spec = GrammarSpec("regex", "(abc){2,}", "guided_regex")
    limited, stopped = answers(
        [spec, spec], [SamplingParams(max_tokens=4, temperature=0), SamplingParams(temperature=0, stop=("ca",))]
    )
    assert (limited.reason, limited.text) == ("length", "abca")
    assert (stopped.reason, stopped.text) == ("stop", "ab")


def test_requests_without_a_grammar_are_not_touched_by_their_neighbours(answers):
    params = [SamplingParams(max_tokens=20, temperature=0.9, seed=seed, logprobs=2) for seed in range(4)]
    plain = answers([None] * 4, params)
    mixed = answers([None, spec_of(SCHEMAS["flat"]), None, spec_of(SCHEMAS["array"])], params)
    for index in (0, 2):
        assert mixed[index].token_ids == plain[index].token_ids
        assert mixed[index].outputs[3].logprobs == plain[index].outputs[3].logprobs
    assert mixed[1].token_ids != plain[1].token_ids


def test_logprobs_are_the_models_own(answers, scripted):
    params = SamplingParams(max_tokens=30, temperature=0, logprobs=3)
    [inbox] = answers([spec_of(SCHEMAS["flat"])], params)
    logits = scripted.logits([7, 0, *inbox.token_ids], 257)[1:-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    reported = [logprob for output in inbox.outputs for logprob in output.logprobs]
    assert [each.token_id for each in reported] == inbox.token_ids
    for row, each in zip(expected, reported, strict=True):
        assert each.logprob == pytest.approx(row[each.token_id], abs=1e-4)
        assert [token for token, _ in each.top] == np.argsort(-row)[:3].tolist()
    assert any(each.token_id != each.top[0][0] for each in reported), "the grammar ruled the likeliest out somewhere"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["chain of 4", "2x2", "26 nodes"])
@pytest.mark.parametrize("source", ["oracle", "mixed", "wrong"])
def test_answers_are_those_without_guesses(answers, speculation, source, shape, temperature):
    specs = [spec_of(SCHEMAS[name]) for name in ("flat", "optional", "recursive", "map")] + [None]
    params = [SamplingParams(max_tokens=80, temperature=temperature, seed=seed, logprobs=1) for seed in range(5)]
    plain = answers(specs, params)
    truth = {f"r{index}": inbox.token_ids for index, inbox in enumerate(plain)}
    speculator = speculation.make(source, shape, truth, 257)
    guessed = answers(specs, params, speculator=speculator)
    for one, other in zip(plain, guessed, strict=True):
        assert (other.token_ids, other.text, other.reason) == (one.token_ids, one.text, one.reason)
        assert other.outputs[-1].usage == one.outputs[-1].usage
    accepted = sum(len(each.path) for each in speculator.verified)
    assert (accepted > 0) == (source != "wrong")


def test_an_answer_that_is_preempted_midway_goes_on_where_it_was(answers):
    spec = spec_of(SCHEMAS["map"])
    params = [SamplingParams(max_tokens=60, temperature=1.0, seed=seed) for seed in range(4)]
    prompts = [[index] * 20 for index in range(4)]
    calm = answers([spec] * 4, params, prompts=prompts)
    tight = answers([spec] * 4, params, prompts=prompts, num_blocks=28, max_seq_len=100)
    assert answers.engine.stats().preemptions > 0
    assert [inbox.token_ids for inbox in tight] == [inbox.token_ids for inbox in calm]
    assert [inbox.reason for inbox in tight] == [inbox.reason for inbox in calm]


class StuckMatcher:
    """Lets every byte follow until `after` tokens; then fails, or lets nothing follow."""

    def __init__(self, after, fails, tokens=0):
        self.after, self.fails, self.tokens = after, fails, tokens
        self.failed = False

    def deep_copy(self):
        return StuckMatcher(self.after, self.fails, self.tokens)

    def consume_token(self, token):
        return self.consume_tokens([token])

    def consume_tokens(self, tokens):
        self.tokens += len(tokens)
        return not self.failed

    def rollback(self, count):
        self.tokens -= count
        return not self.failed

    def compute_bitmask(self):
        self.failed |= self.fails and self.tokens >= self.after
        return np.full(9, 0 if self.tokens >= self.after else 0xFFFF_FFFF, np.uint32).tobytes()

    def is_error(self):
        return self.failed

    def is_stopped(self):
        return self.failed

    def get_error(self):
        return "step_max_items exceeded"


@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize(
    ("fails", "code"), [(True, "grammar_too_complex"), (False, "grammar_dead_end")], ids=["fails", "dead end"]
)
def test_a_grammar_that_cannot_go_on_ends_its_request_alone(answers, speculation, guesses, fails, code):
    params = SamplingParams(max_tokens=12, temperature=0)
    stuck = Grammar(StuckMatcher(5, fails), 257, "grammar")
    plain, other = answers([None, None], params)
    truth = {"r0": plain.token_ids, "r1": other.token_ids}
    speculator = speculation.make("oracle", "2x2", truth, 257) if guesses else None
    failed, unharmed = answers([stuck, None], params, speculator=speculator)
    assert failed.reason == "error"
    assert isinstance(failed.outputs[-1].error, RequestError)
    # Behind a guess both are the same: nobody can go there.
    assert failed.outputs[-1].error.code in ({code, "grammar_dead_end"} if guesses else {code})
    assert failed.outputs[-1].error.param == "grammar"
    assert failed.token_ids == plain.token_ids[: len(failed.token_ids)]
    assert len(failed.token_ids) <= 5
    assert unharmed.token_ids == other.token_ids
    assert answers.engine.stats().failed_steps == 0


def test_a_plan_without_a_tokenizer_has_no_grammars(make_engine):
    with pytest.raises(RequestError, match="needs a tokenizer, and the plan has none") as refusal:
        make_engine(vocab_size=257).compile_grammar(GrammarSpec("regex", "a", "guided_regex"))
    assert refusal.value.param == "guided_regex"


def test_a_wish_that_contradicts_the_grammar_is_refused_at_once(make_engine, byte_tokenizer):
    engine = make_engine(tokenizer=byte_tokenizer, **WIDE)
    grammar = engine.compile_grammar(GrammarSpec("regex", "a+", "guided_regex"))
    with pytest.raises(RequestError, match="ignore_eos"):
        engine.submit([1], SamplingParams(ignore_eos=True), on_output=print, grammar=grammar)


def test_the_rows_of_a_scored_prompt_are_not_sampled(answers):
    """Every position of it has logits, in each of its chunks; a token follows the last one only."""
    prompt = list(range(60, 90))
    options = {"prompts": [prompt], "max_step_tokens": 8}
    [plain] = answers([None], SamplingParams(max_tokens=5, temperature=1.0, seed=3), **options)
    scored_params = SamplingParams(max_tokens=5, temperature=1.0, seed=3, logprobs=1, prompt_logprobs=True)
    [scored] = answers([None], scored_params, **options)
    assert scored.token_ids == plain.token_ids
    assert [token.token_id for token in scored.outputs[0].prompt_logprobs[1:]] == prompt[1:]
    assert all(output.prompt_logprobs is None for output in scored.outputs[1:])
    [only] = answers([None], SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=True), **options)
    assert (only.token_ids, only.reason) == ([], "length")
    assert only.outputs[-1].prompt_logprobs == scored.outputs[0].prompt_logprobs
