"""Sampling along trees of guesses: guesses decide how many tokens come of a call, never which."""

import numpy as np
import pytest

from optimc_runtime import _native
from optimc_runtime.request import SamplingParams
from optimc_runtime.sampler import RowMasks, SamplingState, sample, sample_trees
from optimc_runtime.speculate.tree import tree_shape

CHAIN = (-1, 0)
TREE = (-1, -1, 0, 0, 1, 1)
VOCAB = 8


def state_of(vocab_size=VOCAB, stop_ids=frozenset(), prompt=(0,), **params):
    params = SamplingParams(**{"temperature": 0.0, **params})
    return SamplingState(params, list(prompt), frozenset(stop_ids), vocab_size, params.seed or 0)


def verify(rows, states, shapes, tokens, typical=(0.0, 0.0), masks=None):
    """`rows`: logits per sequence [n+1, V]; `tokens`: guesses per sequence [n]."""
    counts = [1 + shape.num_nodes for shape in shapes]
    first_rows = np.cumsum([0, *counts[:-1]]).tolist()
    return sample_trees(
        np.concatenate(rows).astype(np.float32),
        states,
        first_rows,
        counts,
        np.concatenate([shape.query_parents for shape in shapes]),
        np.array([token for mine in tokens for token in (0, *mine)], np.int64),
        typical,
        masks,
    )


def favouring(*tokens, vocab_size=VOCAB):
    """Rows of logits whose greedy choices are `tokens`."""
    rows = np.zeros((len(tokens), vocab_size), np.float32)
    rows[np.arange(len(tokens)), tokens] = 5
    return rows


def test_the_walk_follows_guesses_that_are_right_and_emits_one_token_more():
    shape = tree_shape(TREE)
    rows = favouring(3, 1, 4, 6, 1, 2, 7)
    # The root wants 3, guessed by node 1; its row wants 4, guessed by its second child, node 5; that wants 7.
    state = state_of()
    samples = verify([rows], [state], [shape], [[2, 3, 1, 5, 6, 4]])
    assert samples.token_ids == [[3, 4, 7]]
    assert samples.paths == [[2, 6]]
    assert samples.last_rows == [6]
    assert samples.logprobs == [()]
    assert not samples.failures
    assert state.position == 3


def test_a_wrong_guess_costs_nothing_but_its_row():
    samples = verify([favouring(3, 1, 1)], [state_of()], [tree_shape(CHAIN)], [[2, 3]])
    assert (samples.token_ids, samples.paths, samples.last_rows) == ([[3]], [[]], [0])


def test_sequences_with_and_without_trees_share_a_call():
    shapes = [tree_shape(()), tree_shape(CHAIN), tree_shape(())]
    rows = [favouring(1), favouring(2, 3, 4), favouring(5)]
    samples = verify(rows, [state_of() for _ in range(3)], shapes, [[], [2, 3], []])
    assert samples.token_ids == [[1], [2, 3, 4], [5]]
    assert samples.last_rows == [0, 3, 4]


def test_a_stop_token_ends_the_walk_even_if_it_was_guessed():
    samples = verify([favouring(3, 4, 5)], [state_of(stop_ids={3})], [tree_shape(CHAIN)], [[3, 4]])
    assert (samples.token_ids, samples.paths) == ([[3]], [[]])


def test_stop_tokens_are_banned_until_min_tokens_is_reached_inside_the_path():
    rows = favouring(3, 3, 3)
    rows[:, 4] = 4  # what is chosen while 3 is banned
    samples = verify([rows], [state_of(stop_ids={3}, min_tokens=2)], [tree_shape(CHAIN)], [[4, 4]])
    assert samples.token_ids == [[4, 4, 3]]


def test_a_nan_on_one_path_fails_that_sequence_alone():
    rows = [favouring(2, 3, 4), favouring(2, 3, 4), favouring(2, 3, 4)]
    rows[1][1, 0] = np.nan
    rows[2][2, 0] = np.nan  # a node that nobody reaches
    states = [state_of() for _ in range(3)]
    samples = verify(rows, states, [tree_shape(CHAIN)] * 3, [[2, 3], [2, 3], [2, 0]])
    assert samples.token_ids == [[2, 3, 4], [2], [2, 3]]
    assert list(samples.failures) == [1]
    assert "output position 1" in str(samples.failures[1])
    assert "NaN" in str(samples.failures[1])
    assert samples.sampled(1) is None


def test_a_row_that_leaves_nothing_fails_in_words():
    rows = favouring(2, 3, 4)
    rows[1] = -np.inf
    samples = verify([rows], [state_of()], [tree_shape(CHAIN)], [[2, 3]])
    assert "every token is masked out" in str(samples.failures[0])


def test_logprobs_are_those_of_each_emitted_token():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, VOCAB)).astype(np.float32)
    path = rows.argmax(axis=1).tolist()
    states = [state_of(logprobs=3), state_of()]
    samples = verify([rows, favouring(1)], states, [tree_shape(CHAIN), tree_shape(())], [path[:2], []])
    assert samples.logprobs[1] == ()
    for row, token, reported in zip(rows, path, samples.logprobs[0], strict=True):
        expected = row - np.log(np.exp(row.astype(np.float64)).sum())
        assert reported.token_id == token
        assert reported.logprob == pytest.approx(expected[token], abs=1e-5)
        assert [token for token, _ in reported.top] == np.argsort(-row)[:3].tolist()
        assert [logprob for _, logprob in reported.top] == pytest.approx(np.sort(expected)[::-1][:3], abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_rows": [2]}, "outside the logits"),
        ({"first_rows": [-1]}, "outside the logits"),
        ({"counts": [0]}, "outside the logits"),
        ({"counts": [4]}, "outside the logits"),
        ({"parents": [-1, 0, 2]}, "before their children"),
        ({"parents": [-1, -1, 0]}, "before their children"),
        ({"parents": [-1, 0]}, "parents: length 2, want 3"),
        ({"counts": [3, 3]}, "lengths 1 and 2, want 1"),
        ({"epsilon": 1.5}, "epsilon"),
        ({"delta": -1.0}, "delta"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    given = {"first_rows": [0], "counts": [3], "parents": [-1, 0, 1], "epsilon": 0.0, "delta": 0.0, **change}
    given["parents"] = np.array(given["parents"], np.int32)
    with pytest.raises(ValueError, match=message):
        _native.sample_trees(
            np.zeros((3, VOCAB), np.float32), [state_of().row], tokens=np.zeros(3, np.int64), **given
        )  # fmt: skip


def test_guesses_outside_the_vocabulary_are_wrong():
    samples = verify(
        [favouring(3, 1, 1)], [state_of(temperature=1.0)], [tree_shape(CHAIN)], [[-5, VOCAB + 9]], (0.1, 0.3)
    )
    assert samples.paths == [[]]


MIXES = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "filtered": {"temperature": 0.7, "top_p": 0.8, "top_k": 12, "min_p": 0.02},
    "penalized": {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.8},
    "biased": {"logit_bias": {4: 3.0, 6: -50.0}, "temperature": 0.5},
    "min_tokens": {"min_tokens": 9, "temperature": 1.0},
    "logprobs": {"logprobs": 4, "temperature": 1.0},
}


@pytest.mark.parametrize("mix", MIXES)
def test_the_same_seed_gives_the_tokens_of_sampling_one_by_one(mix):
    """A table of logits by last token stands for the model; guesses are right now and then."""
    vocab, length = 24, 40
    rng = np.random.default_rng(0)
    table = (rng.standard_normal((vocab, vocab)) * 2).astype(np.float32)
    shapes = [tree_shape(parents) for parents in (CHAIN, TREE, (-1, 0, 1, 2), (-1, -1, -1, 0, 1, 2, 2, 4))]
    for seed in range(6):
        options = {"vocab_size": vocab, "stop_ids": {3}, "prompt": [1, 2], "seed": seed, **MIXES[mix]}
        expected, probs, state = [], [], state_of(**options)
        while len(expected) < length and 3 not in expected:
            (choice,) = sample(table[[expected[-1] if expected else 2]], [state])
            state.accept(choice.token_id)
            expected.append(choice.token_id)
            probs.append(choice.logprob)
        got, got_probs, state, longest = [], [], state_of(**options), 0
        while len(got) < len(expected):
            shape = shapes[int(rng.integers(len(shapes)))]
            guesses: list[int] = []
            for node, parent in enumerate(shape.parents):
                depth = int(shape.depths[node + 1])
                taken = {guesses[other] for other in range(node) if shape.parents[other] == parent}
                true = expected[len(got) + depth - 1] if len(got) + depth <= len(expected) else 0
                wanted = true if rng.random() < 0.7 else int(rng.integers(vocab))
                guesses.append(wanted if wanted not in taken else next(t for t in range(vocab) if t not in taken))
            last = got[-1] if got else 2
            samples = verify([table[[last, *guesses]]], [state], [shape], [guesses])
            got += samples.token_ids[0]
            got_probs += samples.logprobs[0]
            longest = max(longest, len(samples.token_ids[0]))
        assert got[: len(expected)] == expected
        assert longest >= 2 or len(expected) < 3
        if "logprobs" in MIXES[mix]:
            assert got_probs[: len(expected)] == probs


def filtered(logits, temperature, top_p):
    """[..., V] probabilities after temperature and top_p."""
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    probs = weights / weights.sum(axis=-1, keepdims=True)
    order = np.argsort(-probs, axis=-1, kind="stable")
    ranked = np.take_along_axis(probs, order, axis=-1)
    kept = np.cumsum(ranked, axis=-1) - ranked < top_p
    probs = np.zeros_like(probs)
    np.put_along_axis(probs, order, np.where(kept, ranked, 0), axis=-1)
    return probs / probs.sum(axis=-1, keepdims=True)


class TableModel:
    """Logits by the last two tokens, and three tokens drawn from it through trees, many times at once."""

    def __init__(self, temperature, top_p, parents, draft, sequences):
        rng = np.random.default_rng(1)
        self.table = (rng.standard_normal((VOCAB, VOCAB, VOCAB)) * 1.5).astype(np.float32)
        self.probs = filtered(self.table.astype(np.float64), temperature, top_p)
        self.shape = tree_shape(parents)
        self.draft = draft
        self.rng = rng
        self.rows = [
            state_of(temperature=temperature, top_p=top_p, seed=int(seed)).row
            for seed in rng.integers(0, 1 << 62, sequences)
        ]

    def draws(self):
        """[n, 3] tokens of as many independent draws as there are sequences."""
        n = len(self.rows)
        tokens = np.zeros((n, 5), np.int64)  # two of context, both 0
        known = np.full(n, 2)
        for count in (2, 3, 4):
            mine = np.flatnonzero(known == count)
            depth = 4 - count
            nodes = [node for node in range(self.shape.num_nodes) if self.shape.depths[node + 1] <= depth]
            shape = tree_shape(tuple(self.shape.parents[node] for node in nodes))
            guesses = self._guess(tokens[mine, count - 2], tokens[mine, count - 1], shape)
            histories = np.stack([tokens[mine, count - 2], tokens[mine, count - 1]], axis=1)
            pairs = [histories]
            for node, parent in enumerate(shape.parents):
                pairs.append(np.stack([pairs[parent + 1][:, 1], guesses[:, node]], axis=1))
            rows = np.stack([self.table[pair[:, 0], pair[:, 1]] for pair in pairs], axis=1)
            size = 1 + shape.num_nodes
            emitted, *_ = _native.sample_trees(
                rows.reshape(-1, VOCAB),
                [self.rows[index] for index in mine],
                list(range(0, size * len(mine), size)),
                [size] * len(mine),
                np.tile(shape.query_parents, len(mine)),
                np.concatenate([np.zeros((len(mine), 1), np.int64), guesses], axis=1).ravel(),
            )
            lengths = np.array([len(each) for each in emitted])
            places = np.arange(lengths.sum()) - (np.cumsum(lengths) - lengths).repeat(lengths)
            tokens[mine.repeat(lengths), count + places] = [token for each in emitted for token in each]
            known[mine] += lengths
        assert (known == 5).all()
        return tokens[:, 2:]

    def _guess(self, before, last, shape):
        guesses = np.zeros((len(last), shape.num_nodes), np.int64)
        ends = [np.stack([before, last], axis=1)]
        for node, parent in enumerate(shape.parents):
            end = ends[parent + 1]
            probs = self.probs[end[:, 0], end[:, 1]].copy()
            if self.draft == "disjoint":
                probs = 1.001 - probs / probs.max(axis=1, keepdims=True)  # likeliest where the model is not
            elif self.draft == "zero mass":
                probs = np.where(probs == 0, 1.0, 1e-9)
            for other in range(node):
                if shape.parents[other] == parent:
                    probs[np.arange(len(probs)), guesses[:, other]] = -1
            noise = -np.log(self.rng.exponential(size=probs.shape))
            with np.errstate(divide="ignore"):
                scores = np.where(probs >= 0, np.log(np.maximum(probs, 1e-12)) + noise, -np.inf)
            guesses[:, node] = scores.argmax(axis=1)
            ends.append(np.stack([end[:, 1], guesses[:, node]], axis=1))
        return guesses

    def expected(self):
        """[8, 8, 8] probabilities of three tokens."""
        first = self.probs[0, 0]
        second = self.probs[0]
        return first[:, None, None] * second[:, :, None] * self.probs


def chi_square_p(observed, expected):
    """Upper tail of Pearson's statistic; cells expected less than 8 times are one."""
    assert observed[expected == 0].sum() == 0, "a token without probability was drawn"
    rare = expected < 8
    cells = np.append(observed[~rare], observed[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    kept = cells[1] > 0
    statistic = ((cells[0][kept] - cells[1][kept]) ** 2 / cells[1][kept]).sum()
    freedom = kept.sum() - 1
    # Wilson and Hilferty's cube root is normal to three digits at these degrees of freedom.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    return 0.5 * float(np.exp(-z * z / 2) / max(z, 1) / 1.25) if z > 3 else 0.5


def frequencies(model, rounds):
    observed = np.zeros((VOCAB, VOCAB, VOCAB))
    for _ in range(rounds):
        np.add.at(observed, tuple(model.draws().T), 1)
    return observed


@pytest.mark.parametrize(
    ("parents", "temperature", "top_p", "draft"),
    [
        (TREE, 1.0, 0.7, "target"),
        *(
            pytest.param(parents, temperature, top_p, draft, marks=pytest.mark.slow)
            for parents in (CHAIN, TREE)
            for temperature in (0.5, 1.0)
            for top_p in (0.7, 1.0)
            for draft in ("target", "disjoint", "zero mass")
        ),
    ],
)
def test_three_tokens_have_the_models_distribution(parents, temperature, top_p, draft):
    model = TableModel(temperature, top_p, parents, draft, 20_000)
    observed = frequencies(model, 10)
    assert observed.sum() == 200_000
    assert chi_square_p(observed, model.expected() * observed.sum()) > 1e-4


def test_the_chi_square_test_tells_a_slightly_sharper_distribution():
    model = TableModel(1.0, 1.0, CHAIN, "target", 10_000)
    observed = frequencies(model, 3)
    assert chi_square_p(observed, model.expected() * observed.sum()) > 1e-4
    sharper = model.expected() ** 1.1
    assert chi_square_p(observed, sharper / sharper.sum() * observed.sum()) < 1e-4


def test_typical_acceptance_takes_the_likeliest_guess_above_the_threshold():
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05, 1e-9, 1e-9, 1e-9, 1e-9]] * 5, np.float32))
    shape = tree_shape((-1, -1, -1, -1))
    taken = []
    for guesses in ([3, 2, 1, 0], [3, 2, 4, 5], [3, 4, 5, 6]):
        for seed in range(20):
            state = state_of(temperature=1.0, seed=seed)
            samples = verify([logits], [state], [shape], [guesses], (0.09, 1.0))
            taken.append((guesses[0:2], samples.token_ids[0][0]))
    assert {token for guesses, token in taken[:20]} == {0}, "the likeliest of all"
    assert {token for guesses, token in taken[20:40]} == {2}, "the likeliest guess, though others are likelier"
    assert len({token for guesses, token in taken[40:]}) > 1, "0.05 is below the threshold: sampled"


def test_typical_acceptance_follows_the_entropy():
    """min(epsilon, delta * exp(-entropy)): a flat row lowers the threshold."""
    flat = np.zeros((2, VOCAB), np.float32)  # every token 1/8, entropy log 8
    for delta, always in ((0.9, True), (1.1, False)):  # thresholds of 0.9 / 8 and 1.1 / 8
        tokens = {
            verify([flat], [state_of(temperature=1.0, seed=seed)], [tree_shape((-1,))], [[5]], (0.5, delta)).token_ids[
                0
            ][0]
            for seed in range(30)
        }
        assert (tokens == {5}) == always


def test_typical_acceptance_leaves_greedy_sequences_and_banned_tokens_alone():
    rows = favouring(2, 3)
    rows[0, 4] = 4.9
    shape = tree_shape((-1,))
    assert verify([rows], [state_of()], [shape], [[4]], (0.09, 0.3)).token_ids == [[2]]
    sampled = state_of(temperature=1.0, stop_ids={4}, min_tokens=5)
    assert verify([rows], [sampled], [shape], [[4]], (0.09, 0.3)).token_ids[0][0] != 4


@pytest.mark.parametrize("limit", [{"top_k": 2}, {"top_p": 0.75}, {"min_p": 0.4}])
def test_typical_acceptance_takes_nothing_that_the_request_leaves_out(limit):
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05, 1e-9, 1e-9, 1e-9, 1e-9]] * 2, np.float32))
    shape = tree_shape((-1,))
    for guess, may_be_taken in ((1, True), (2, False)):
        tokens = {
            verify([logits], [state_of(temperature=1.0, seed=seed, **limit)], [shape], [[guess]], (0.09, 1.0))
            .token_ids[0][0]
            for seed in range(20)
        }  # fmt: skip
        assert (tokens == {guess}) == may_be_taken
        assert tokens <= {0, 1}


def test_typical_acceptance_reports_logprobs_of_the_model():
    logits = np.log(np.array([[0.6, 0.4, *[1e-9] * 6]] * 2, np.float32))
    state = state_of(temperature=2.0, logprobs=1, seed=1)
    samples = verify([logits], [state], [tree_shape((-1,))], [[1]], (0.09, 0.3))
    assert samples.token_ids[0][0] == 1
    assert samples.logprobs[0][0].logprob == pytest.approx(np.log(0.4), abs=1e-5)
    assert samples.logprobs[0][0].top[0][0] == 0


@pytest.mark.parametrize("typical", [(0.0, 0.0), (0.9, 0.9)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_along_a_tree_are_rows_whose_other_tokens_are_minus_infinity(temperature, typical):
    rng = np.random.default_rng(11)
    shape = tree_shape(TREE)
    lengths = set()
    for seed in range(200):
        rows = rng.standard_normal((1 + len(TREE), VOCAB)).astype(np.float32) * 3
        allowed = rng.random(rows.shape) < 0.4
        allowed[:, rng.integers(VOCAB)] = True
        tokens = [*rng.permutation(VOCAB)[:2], *rng.permutation(VOCAB)[:2], *rng.permutation(VOCAB)[:2]]
        words = (allowed * (1 << np.arange(VOCAB))).sum(axis=1, keepdims=True).astype(np.uint32)
        masks = RowMasks(words, np.arange(len(rows), dtype=np.int32))
        options = {"temperature": temperature, "seed": seed, "logprobs": 1}
        masked = verify([rows], [state_of(**options)], [shape], [tokens], typical, masks)
        written = verify([np.where(allowed, rows, -np.inf)], [state_of(**options)], [shape], [tokens], typical)
        assert masked.token_ids == written.token_ids
        assert masked.paths == written.paths
        lengths.add(len(masked.token_ids[0]))
        for query, token, logprob in zip([0, *masked.paths[0]], masked.token_ids[0], masked.logprobs[0], strict=True):
            assert allowed[query, token]
            raw = rows[query].astype(np.float64)
            assert logprob.logprob == pytest.approx(raw[token] - np.log(np.exp(raw).sum()), abs=1e-5)
    assert lengths == {1, 2, 3}
