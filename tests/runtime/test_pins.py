"""Pinned prefixes stay, whatever comes."""

import random
import threading

import pytest

from optimc.errors import ConfigError, EngineError, RequestError
from optimc_runtime.config import EngineConfig

PREFIX = [(5 * i) % 64 for i in range(18)]


@pytest.fixture
def engine(make_engine):
    with make_engine(num_blocks=16, max_seq_len=64) as engine:
        yield engine


def cached_tokens(engine, drive, prompt):
    [generation] = engine.generate([prompt], drive.greedy(1))
    return generation.usage.cached_tokens


def test_pins_survive_a_flood_of_ten_times_the_pool(engine, drive, scripted):
    assert engine.pin_prefix(PREFIX) == 4
    rng = random.Random(0)
    flood = [[rng.randrange(64) for _ in range(20)] for _ in range(10 * 16 * 4 // 20)]
    engine.generate(flood, drive.greedy(2))
    stats = engine.stats()
    assert stats.prefix_evicted_blocks > 100
    assert (stats.pinned_blocks, stats.blocks_used) == (4, 4)
    assert stats.prefix_cached_blocks == 4 + stats.blocks_cached
    [generation] = engine.generate([[*PREFIX, 7]], drive.greedy(3))
    assert generation.usage.cached_tokens == 16
    assert list(generation.token_ids) == scripted.greedy([*PREFIX, 7], 3)


def test_without_a_pin_the_same_flood_drives_it_out(engine, drive):
    engine.generate([PREFIX], drive.greedy(1))
    rng = random.Random(0)
    engine.generate([[rng.randrange(64) for _ in range(20)] for _ in range(32)], drive.greedy(2))
    assert cached_tokens(engine, drive, [*PREFIX, 7]) == 0


def test_what_is_accepted_fits_beside_the_pins(engine, drive, scripted):
    assert engine.max_request_tokens == 64
    engine.pin_prefix(PREFIX)
    assert engine.max_request_tokens == 48
    with pytest.raises(RequestError, match="49 tokens; the limit is 48 tokens"):
        drive.submit(engine, [1] * 30, drive.greedy(19))
    prompts = [[i] * 10 for i in range(6)]
    answers = engine.generate(prompts, drive.greedy(38))
    assert [list(each.token_ids) for each in answers] == [scripted.greedy(prompt, 38) for prompt in prompts]
    assert engine.stats().preemptions > 0
    engine.scheduler.check_integrity()


def test_prefixes_share_their_pins(engine):
    assert engine.pin_prefix(PREFIX) == 4
    assert engine.pin_prefix([*PREFIX[:8], *range(8)]) == 4
    assert engine.stats().pinned_blocks == 6
    engine.scheduler.check_integrity()


def test_a_pin_belongs_to_its_salt(engine, drive):
    engine.pin_prefix(PREFIX, cache_salt="mine")
    assert cached_tokens(engine, drive, [*PREFIX, 7]) == 0
    inbox = drive.submit(engine, [*PREFIX, 7], drive.greedy(1), cache_salt="mine")
    engine.close(drain=True)
    assert inbox.outputs[-1].usage.cached_tokens == 16


def test_reset_drops_pins_too(engine, drive):
    engine.pin_prefix(PREFIX)
    engine.reset_prefix_cache()
    stats = engine.stats()
    assert (stats.pinned_blocks, stats.blocks_free) == (0, 16)
    assert engine.max_request_tokens == 64
    assert cached_tokens(engine, drive, [*PREFIX, 7]) == 0


def test_what_cannot_be_pinned_is_refused_in_words(engine, make_engine):
    with pytest.raises(ConfigError, match="--pin-prefix: the prefix has 3 tokens; only whole blocks of 4 are cached"):
        engine.pin_prefix([1, 2, 3])
    with pytest.raises(ConfigError, match="takes 9 blocks; at most half of the pool's 16 may be pinned"):
        engine.pin_prefix(list(range(36)))
    engine.pin_prefix(list(range(24)))
    with pytest.raises(ConfigError, match="takes 3 blocks beside the 6 pinned already"):
        engine.pin_prefix([5] * 12)
    assert engine.stats().pinned_blocks == 6
    with (
        make_engine(EngineConfig(prefix_cache=False)) as plain,
        pytest.raises(ConfigError, match="cache, which is off"),
    ):
        plain.pin_prefix(PREFIX)


def test_pinning_among_requests_is_refused_and_harms_none(engine, drive):
    release, held = threading.Event(), threading.Event()

    def hold(plan):
        held.set()
        release.wait(10)

    engine.executor.before_step = hold
    inbox = drive.submit(engine, [1], drive.greedy(60))
    assert held.wait(10)
    threading.Timer(0.05, release.set).start()
    with pytest.raises(EngineError, match="before requests come"):
        engine.pin_prefix(PREFIX)
    engine.close(drain=True)
    assert inbox.reason == "length"
    drive.assert_idle(engine)
