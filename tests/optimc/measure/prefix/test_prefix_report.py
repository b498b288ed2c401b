"""Every planted killer is named, with its field; nothing is named in traffic that has none."""

import dataclasses
import time
import unicodedata

import pytest

from optimc.errors import ConfigError
from optimc.measure.load.traffic import TrafficLine
from optimc.measure.prefix.prefix_report import prefix_report

NOW_S = 1_795_000_000.0
SYSTEM = "messages[0].content"
PATHS = {
    "timestamp": SYSTEM,
    "id": SYSTEM,
    "tool_order": "tools",
    "key_order": "tools[0].function.parameters.properties",
    "user_before_shared": SYSTEM,
    "whitespace": SYSTEM,
}


def report_of(lines, **options):
    return prefix_report(lines, now_s=NOW_S, **options)


def named(report):
    return {(killer.kind, killer.path) for killer in report.killers}


def chat(number, *contents, roles=("system", "user"), **fields):
    messages = tuple({"role": role, "content": content} for role, content in zip(roles, contents, strict=False))
    return TrafficLine(number=number, at_s=float(number), messages=messages, **fields)


@pytest.mark.parametrize("kind", PATHS)
def test_a_planted_killer_is_named_alone_with_its_field_and_edit(traffic, kind):
    report = report_of(traffic.planted(1, [kind], 120))
    assert named(report) == {(kind, PATHS[kind])}
    (killer,) = report.killers
    assert PATHS[kind] in killer.edit or kind == "tool_order"
    assert killer.example_a != killer.example_b
    assert report.could_be_tokens > report.was_tokens


@pytest.mark.parametrize("seed", range(3))
def test_killers_planted_all_at_once_are_all_named(traffic, seed):
    report = report_of(traffic.planted(seed, list(traffic.PLANTS), 150))
    assert {killer.kind for killer in report.killers} == set(traffic.PLANTS)


@pytest.mark.parametrize("seed", range(20))
def test_clean_traffic_has_no_killer_and_nothing_to_gain(traffic, seed):
    report = report_of(traffic.clean(seed, 120))
    assert report.killers == ()
    assert report.could_be_tokens == report.was_tokens


def test_tokens_lost_are_those_that_the_edit_brings_back():
    # Without a plan a prompt is "<|system|>\n" (11), "12:00:0N " (9), 620 characters, "\n" (1), "<|user|>\n" (9), one
    # letter and "\n" (2). The clock's last digit, character 18, ends what is shared in the first block of 16 tokens
    # (64 characters). After the edit the characters up to the user's letter are common, 650 less the moved clock: ten
    # blocks end at 640, 160 tokens. All but the first of six requests lose them: 800.
    shared = "".join(f"{number:03}, alpha " for number in range(60))[:620]
    lines = [chat(number, f"12:00:0{number} {shared}", "abcdef"[number]) for number in range(6)]
    (killer,) = report_of(lines).killers
    assert (killer.kind, killer.path, killer.requests) == ("timestamp", SYSTEM, 6)
    assert killer.tokens_lost == 800
    assert killer.first_index == 18 // 4
    (faster,) = report_of(lines, prefill_tokens_per_s=200.0).killers
    assert faster.seconds_lost == 4.0


def test_accents_written_in_two_ways_are_whitespace_not_content(traffic):
    shared = traffic.App(3, 0).system + " Déjà vu. "
    lines = [
        chat(number, unicodedata.normalize("NFD" if number % 2 else "NFC", "Café. ") + shared * 2, f"Question {number}")
        for number in range(8)
    ]
    # Each form shares with itself, so only the first of the second form loses anything.
    assert named(report_of(lines)) <= {("whitespace", SYSTEM)}
    mixed = [
        dataclasses.replace(line, messages=({"role": "system", "content": "é" * n + "e\u0301" * (8 - n) + shared * 2},))
        for n, line in enumerate(lines)
    ]
    assert named(report_of(mixed)) == {("whitespace", SYSTEM)}


def test_a_bos_written_twice_is_the_templates(traffic):
    shared = traffic.App(3, 0).system
    lines = [
        TrafficLine(number=n, at_s=float(n), prompt="<s>" * (1 + n % 7) + shared + f" Question {n}: why?")
        for n in range(7)
    ]
    assert named(report_of(lines)) == {("template_drift", "template")}


def test_a_users_last_message_that_begins_with_a_date_is_none(traffic):
    shared = traffic.App(4, 0).system
    lines = [
        chat(number, shared, f"2026-11-{number + 1:02}: {traffic.App(5, 0).system} What now?") for number in range(20)
    ]
    assert named(report_of(lines)) == set()


def test_cheap_killers_are_not_named(traffic):
    # Two requests of a kind are no family.
    shared = traffic.App(6, 0).system
    lines = [chat(number, f"12:00:0{number} {shared}", "Question") for number in range(2)]
    assert named(report_of(lines)) == set()


def test_what_was_cached_is_the_logs_word_if_it_has_one(traffic):
    lines = [dataclasses.replace(line, cached_tokens=0, prompt_tokens=400) for line in traffic.clean(1, 20)]
    report = report_of(lines)
    assert (report.was_tokens, report.was_source) == (0, "logged")
    # Nothing stands in the way of the prefix: what the cache missed has another reason, such as too little room.
    assert report.killers == ()


def test_a_redacted_report_holds_no_words_of_a_prompt(traffic):
    report = report_of(traffic.planted(1, ["timestamp"], 60)).redacted()
    assert report.killers
    assert "assista" not in report.table() + str(report.to_json())


def test_lines_without_text_are_counted_and_a_file_of_them_is_refused(traffic):
    lengths = TrafficLine(number=1, prompt_tokens=100)
    report = report_of([*traffic.clean(1, 5), lengths])
    assert (report.requests, report.notes) == (5, ("1 lines say nothing of what was asked and are left out",))
    with pytest.raises(ConfigError, match="no line says what was asked"):
        report_of([lengths])


def test_messages_and_tools_of_no_known_shape_are_refused_with_their_lines():
    lines = [
        chat(1, "Hello"),
        chat(2, 7),
        TrafficLine(number=3, messages=({"role": "assistant", "tool_calls": True},)),
        TrafficLine(number=4, messages=({"role": "user", "content": [{"type": "text", "text": 3}]},)),
        chat(5, "Hello", tools=({"function": "look"},)),
    ]
    with pytest.raises(ConfigError) as caught:
        report_of(lines)
    message = str(caught.value)
    assert "line 1" not in message
    for number in (2, 3, 4, 5):
        assert f"line {number}" in message


@pytest.mark.slow
def test_a_hundred_thousand_requests_take_less_than_two_minutes(traffic):
    # About 500 characters each, a time in front of a third of them. It took 24 s of processor time here; the limit
    # leaves room for busy machines.
    shared = [traffic.App(seed, 0).system[:350] for seed in range(3)]
    lines = [
        chat(
            n,
            (f"{n // 3600 % 24:02}:{n // 60 % 60:02}:{n % 60:02} " if n % 3 == 0 else "") + shared[n % 3],
            f"{n} " * 20,
        )
        for n in range(100_000)
    ]
    start_s = time.perf_counter()
    report = report_of(lines)
    assert time.perf_counter() - start_s < 120
    assert named(report) == {("timestamp", SYSTEM)}
