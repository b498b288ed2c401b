"""Which tokens a grammar lets follow, along an answer and along guesses of it."""

import itertools
import json

import numpy as np
import pytest

from optimc.errors import RequestError
from optimc_runtime.speculate.tree import tree_shape
from optimc_runtime.structured import compiler
from optimc_runtime.structured import grammar as grammar_module
from optimc_runtime.structured.compiler import GrammarCompiler
from optimc_runtime.structured.grammar import Grammar
from optimc_runtime.structured.grammar_spec import GrammarSpec

VOCAB = 300
"""More columns than the 257 tokens of the byte tokenizer, as models have."""
END = 256


@pytest.fixture
def make_grammar(byte_tokenizer):
    grammars = GrammarCompiler(byte_tokenizer, VOCAB, (END,))

    def make(kind, text):
        return grammars.compile(GrammarSpec(kind, text, "grammar"))

    return make


def allowed(state) -> set[int]:
    words = np.empty(-(-VOCAB // 32), np.uint32)
    state.mask(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def tree_masks(state, shape, tokens) -> list[set[int]]:
    words = np.full((1 + len(tokens), -(-VOCAB // 32)), 0x5555, np.uint32)
    state.tree_masks(shape, tokens, words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def accept(state, text: bytes):
    for byte in text:
        state.accept(byte)
    return state


def test_tokens_follow_where_the_regex_goes_on_and_the_end_where_it_may_end(make_grammar):
    state = make_grammar("regex", "ab*(c[0-9]{2})?").start()
    assert allowed(state) == {*b"a"}
    assert allowed(accept(state, b"a")) == {*b"bc", END}
    assert allowed(accept(state, b"bbc")) == {*b"0123456789"}
    assert not state.is_complete
    assert allowed(accept(state, b"42")) == {END}
    assert state.is_complete


@pytest.mark.parametrize(
    ("regex", "text"), [("a\\\\", "a\\"), ("a/b", "a/b"), ("a\\/", "a/"), ("//", "//"), ("#", "#"), ("", "")]
)
def test_what_means_something_in_lark_means_itself_in_a_regex(make_grammar, regex, text):
    assert allowed(accept(make_grammar("regex", regex).start(), text.encode())) == {END}


def test_patterns_that_nothing_joins_may_be_many(make_grammar):
    schema = {"type": "object", "properties": {f"k{n}": {"type": "string", "pattern": f"a{n}"} for n in range(40)}}
    assert allowed(make_grammar("json_schema", json.dumps(schema)).start()) == {*b"{"}


@pytest.mark.parametrize("multiple", [0.01, 0.25, 5, 1000000])
def test_usual_multiples_are_followed(make_grammar, multiple):
    schema = {"type": "object", "properties": {"n": {"type": "number", "multipleOf": multiple}}, "required": ["n"]}
    state = accept(make_grammar("json_schema", json.dumps(schema)).start(), b'{"n": ')
    assert {*b"0"} <= allowed(state)


def test_json_is_spelled_in_one_way(make_grammar):
    state = make_grammar("json_object", "").start()
    assert allowed(state) == {*b"{"}
    accept(state, b'{"a"')
    assert allowed(state) == {*b":"}
    assert allowed(accept(state, b":")) == {*b" "}
    accept(state, b" [1")
    assert not {*b" \n\t"} & allowed(state)
    assert allowed(accept(state, b", ")) >= {*b'0"{[tf'}
    assert accept(state, b"2]}").is_complete


def test_the_same_grammar_is_compiled_once_and_the_oldest_is_forgotten(byte_tokenizer, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_GRAMMARS", 2)
    grammars = GrammarCompiler(byte_tokenizer, VOCAB, (END,))
    specs = [GrammarSpec("regex", text, "guided_regex") for text in "abc"]
    first, second = (grammars.compile(spec) for spec in specs[:2])
    assert grammars.compile(GrammarSpec("regex", "a", "guided_regex")) is first
    grammars.compile(specs[2])
    assert grammars.compile(specs[0]) is first
    assert grammars.compile(specs[1]) is not second


def test_answers_of_one_grammar_do_not_know_of_each_other(make_grammar):
    grammar = make_grammar("regex", "(ab)+")
    one, other = grammar.start(), grammar.start()
    accept(one, b"aba")
    assert allowed(one) == {*b"b"}
    assert allowed(other) == {*b"a"}


def test_without_an_eos_nothing_stands_for_the_end(byte_tokenizer):
    grammars = GrammarCompiler(byte_tokenizer, VOCAB, ())
    state = grammars.compile(GrammarSpec("regex", "ab?", "guided_regex")).start()
    assert allowed(accept(state, b"a")) == {*b"b"}
    assert accept(state, b"b").is_complete


def test_a_special_token_follows_where_the_grammar_names_it_by_id(make_grammar):
    state = make_grammar("lark", f'start: <[{END}]> "x" /[ab<>]*/').start()
    assert allowed(state) == {END}
    state.accept(END)
    assert allowed(state) == {*b"x"}
    assert END in allowed(accept(state, b"x"))  # only as the end
    assert {*b"ab<>"} <= allowed(state)


@pytest.mark.parametrize("end", [0, 1, 4])
def test_masks_along_a_tree_are_those_of_the_states_its_paths_lead_to(make_grammar, end):
    grammar = make_grammar("regex", "(a|b[cd]|ba)*x")
    prefix = b"abcb"[:end]
    parents = (-1, -1, 0, 1, 0, 2, 1, 3, 5, -1)
    shape = tree_shape(parents)
    rng = np.random.default_rng(end)
    seen = {"forbidden": 0, "open": 0, "complete": 0}
    for _ in range(60):
        tokens = [int(token) for token in rng.choice([*b"aabbcdx"], len(parents))]
        state = accept(grammar.start(), prefix)
        before = allowed(state)
        masks = tree_masks(state, shape, tokens)
        assert masks[0] == before == allowed(state), "the state is as it was"
        for node, mask in enumerate(masks[1:]):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            walked = accept(grammar.start(), prefix)
            for step in path:
                if walked.is_complete:
                    break
                if tokens[step] not in allowed(walked):
                    assert mask == set()
                    seen["forbidden"] += 1
                    break
                walked.accept(tokens[step])
            else:
                if not walked.is_complete:
                    assert mask == allowed(walked)
                    seen["open"] += 1
            if walked.is_complete:
                assert len(mask) == VOCAB, "what follows a complete answer is dropped, whatever it is"
                seen["complete"] += 1
        accept(state, bytes([min(before)]))  # and it still goes on
    assert min(seen.values()) > 20


class FailingMatcher:
    """Lets bytes a and b follow; fails where the last was b, as a matcher does that exceeds a limit."""

    def __init__(self, tokens=()):
        self.tokens = list(tokens)
        self.failed = False

    def deep_copy(self):
        return FailingMatcher(self.tokens)

    def consume_token(self, token):
        return self.consume_tokens([token])

    def consume_tokens(self, tokens):
        self.tokens += tokens
        return not self.failed

    def rollback(self, count):
        del self.tokens[len(self.tokens) - count :]
        return not self.failed

    def compute_bitmask(self):
        self.failed |= self.tokens[-1:] == [*b"b"]
        words = np.zeros(-(-VOCAB // 32), np.uint32)
        words[3] = 0 if self.failed else 0b110
        return words.tobytes()

    def is_error(self):
        return self.failed

    def is_stopped(self):
        return self.failed

    def get_error(self):
        return "too many items\n<non-verbose/>" if self.failed else ""


def test_a_guess_behind_which_the_grammar_fails_spoils_nothing_else():
    state = Grammar(FailingMatcher(), VOCAB, "grammar").start()
    accept(state, b"a")
    shape = tree_shape((-1, -1, 0, 1, 3))
    masks = tree_masks(state, shape, [*b"baaab"])
    open_mask = {*b"ab"}
    # The first guess fails, and so does the last; the one below the first is never reached.
    assert masks == [open_mask, set(), open_mask, set(), open_mask, set()]
    assert allowed(state) == open_mask
    state.accept(*b"b")
    with pytest.raises(RequestError, match="cannot be followed any further: too many items$") as failure:
        allowed(state)
    assert (failure.value.code, failure.value.param) == ("grammar_too_complex", "grammar")


def test_what_takes_too_long_is_refused_where_it_shows(make_grammar, monkeypatch):
    state = make_grammar("regex", "(ab)+").start()
    accept(state, b"a")
    monkeypatch.setattr(grammar_module, "MAX_MASK_S", -1.0)
    with pytest.raises(RequestError, match=r"took \d+ ms") as failure:
        allowed(state)
    assert failure.value.code == "grammar_too_complex"
    with pytest.raises(RequestError, match=r"took \d+ ms") as refusal:
        make_grammar("regex", "another")
    assert refusal.value.code == "invalid_grammar"


def joined_patterns(count: int) -> str:
    """A schema of strings that keep to all of `count` patterns at once."""
    return json.dumps({"type": "string", "allOf": [{"pattern": f"a.{{{n}}}b"} for n in range(count)]})


REFUSED = {
    "regex with look-ahead": ("regex", "(?=a)b", "look-around"),
    "regex with an open class": ("regex", "[", "unclosed character class"),
    "long regex": ("regex", "a" * 9000, "9,000 bytes; at most 8,192"),
    "long schema": ("json_schema", '{"description": "' + "x" * 70_000 + '"}', "at most 65,536"),
    "no JSON": ("json_schema", "{", "Expecting"),
    "list for a schema": ("json_schema", "[]", "must be a JSON object"),
    "unknown type": ("json_schema", '{"type": "nope"}', "Invalid type"),
    "uniqueItems": ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    "remote reference": ("json_schema", '{"$ref": "http://example.org/a"}', "does not fetch"),
    "itself and nothing else": ("json_schema", '{"$ref": "#"}', ""),
    "nothing is valid": (
        "json_schema",
        '{"type": "string", "minLength": 3, "maxLength": 2}',
        "Unsatisfiable",
    ),
    "empty enum": ("json_schema", '{"enum": []}', "Unsatisfiable"),
    "deep schema": ("json_schema", '{"items": ' * 300 + "{}" + "}" * 300, "recursion limit"),
    "joined patterns": ("json_schema", joined_patterns(60), "60 patterns and formats"),
    "joined patterns in Lark": ("lark", "start: %json " + joined_patterns(60), "60 patterns and formats"),
    "joined patterns in disguise": (
        "lark",
        "start: %json " + joined_patterns(60).replace("pattern", "p\\u0061ttern").replace("allOf", "all\\u004ff"),
        "patterns and formats",
    ),
    "large multiple": ("json_schema", '{"type": "integer", "multipleOf": 999983}', "multiples of 999983"),
    "fine multiple": ("json_schema", '{"type": "number", "multipleOf": 0.1234567}', "multiples of 1234567"),
    "multiple in disguise": ("lark", 'start: %json {"type": "integer", "multiple\\u004ff": 999983}', "999983"),
    "joined multiples": (
        "json_schema",
        json.dumps({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17)]}),
        "multiples of 17017",
    ),
    "joined expressions": ("lark", "start: T\nT: " + " & ".join(["/(?s:.*)a.b(?s:.*)/"] * 40), "39 times; at most 6"),
    "unknown rule": ("lark", "start: x", "unknown name"),
    "token outside": ("lark", "start: <[9999]>", "too large"),
    "no grammar": ("lark", "hello", ""),
    "options": ("lark", '% llguidance {"no_forcing": false}\nstart: "a"', "not for the request to set"),
    "a grammar of grammars": ("lark", '{"grammars": [{"lark_grammar": "start: /a/"}]}', ""),
    "no way out": ("lark", 'start: start "a"', "lead back to itself"),
    "no way out of a schema": ("json_schema", '{"$ref": "#"}', "lead back to itself"),
    "half an escape": ("regex", "abc\\", "ends in a backslash"),
    "an escape and a half": ("regex", "abc\\\\\\", "ends in a backslash"),
    "no Unicode": ("regex", "a\ud800", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_in_words(make_grammar, name):
    kind, text, words = REFUSED[name]
    with pytest.raises(RequestError) as refusal:
        make_grammar(kind, text)
    assert refusal.value.code == "invalid_grammar"
    assert refusal.value.param == "grammar"
    assert str(refusal.value).startswith("grammar: ")
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 600


HOSTILE = {
    "nested repeats": ("regex", "(a{1,1000}){1,1000}"),
    "star of star": ("regex", "((((a*)*)*)*)*b"),
    "many alternatives": ("regex", "(a|aa)*" * 100),
    "long repeat": ("regex", "a{100000}"),
    "one token for ever": ("lark", 'start: /a+/ /a+/ "x"'),
    "one array for ever": ("json_schema", '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}'),
    "left recursion": ("lark", 'start: start "a" | "b"'),
    "many names": ("json_schema", '{"enum": [' + ", ".join(f'"name{i}"' for i in range(4500)) + "]}"),
    "many items": ("json_schema", '{"type": "array", "minItems": 100000, "items": {"type": "string"}}'),
    "ambiguous": ("lark", "start: a a a a a a a a\na: /x*/ | a a"),
}


def follow(make_grammar, kind, text) -> str | None:
    """Take the lowest token twenty times; return the code of the refusal, if one comes of it."""
    try:
        state = make_grammar(kind, text).start()
        for _ in range(20):
            following = allowed(state) - {END}
            if not following:
                break
            state.accept(min(following))
    except RequestError as refusal:
        return refusal.code
    return None


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_followed(make_grammar, name):
    assert follow(make_grammar, *HOSTILE[name]) in (None, "invalid_grammar", "grammar_too_complex")


def test_a_mask_covers_the_vocabulary_to_the_bit(byte_tokenizer):
    for vocab_size in (257, 288, 289):
        grammars = GrammarCompiler(byte_tokenizer, vocab_size, (END,))
        state = grammars.compile(GrammarSpec("regex", "(?s:.*)", "guided_regex")).start()
        words = np.empty(-(-vocab_size // 32), np.uint32)
        state.mask(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        assert bits[END]
        assert not any(itertools.islice(bits, END + 1, None)), "what is no token has no text to follow by"
