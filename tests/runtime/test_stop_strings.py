"""Stop strings are found across increments, nothing of them is shown, and nothing else is withheld."""

import random

import pytest

from optimc_runtime.stop_strings import StopMatcher


def streamed(stop: list[str], increments: list[str]) -> tuple[str, str | None, list[str]]:
    """Return (shown text, stop string found, increments shown)."""
    matcher = StopMatcher(stop)
    shown: list[str] = []
    for increment in increments:
        safe, found = matcher.push(increment)
        shown.append(safe)
        if found is not None:
            return "".join(shown), found, shown
    shown.append(matcher.flush())
    return "".join(shown), None, shown


def expected(stop: list[str], text: str) -> tuple[str, str | None]:
    """The stop string that completes first, by looking at every beginning of the text."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, rng: random.Random) -> list[str]:
    increments = []
    while text:
        size = rng.choice([1, 1, 2, 3, 8])
        increments.append(text[:size])
        text = text[size:]
    return increments


def test_the_answer_does_not_depend_on_the_increments() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        stop = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 6))) for _ in range(rng.randint(0, 4))]
        text = "".join(rng.choice("abc") for _ in range(rng.randint(0, 40)))
        shown, found, _ = streamed(stop, cut(text, rng))
        assert (shown, found) == expected(stop, text), (stop, text)


def test_only_text_that_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["</end>", "\n\n"])
    assert matcher.push("some <b>text</b> a</e") == ("some <b>text</b> a", None)
    assert matcher.push("nd") == ("", None)
    assert matcher.push("ing") == ("</ending", None)
    assert matcher.push("\n") == ("", None)
    assert matcher.push("x") == ("\nx", None)
    assert matcher.push("y\n") == ("y", None)
    assert matcher.push("\nz") == ("", "\n\n")


def test_flush_returns_what_was_held() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("the STO") == ("the ", None)
    assert matcher.flush() == "STO"


def test_the_first_to_complete_wins_and_of_those_the_longest() -> None:
    assert streamed(["abcd", "bc"], ["xabcd"])[:2] == ("xa", "bc")
    assert streamed(["c", "abc"], ["xabc"])[:2] == ("x", "abc")
    assert streamed(["abc", "c"], ["xab", "c"])[:2] == ("x", "abc")


def test_a_failed_beginning_may_hide_another() -> None:
    assert streamed(["aab"], ["a", "a", "a", "b"])[:2] == ("a", "aab")
    assert streamed(["ababc"], list("abababc"))[:2] == ("ab", "ababc")


def test_without_stop_strings_text_passes() -> None:
    assert streamed([], ["a", "", "b"]) == ("ab", None, ["a", "", "b", ""])


def test_non_ascii_stop_strings_and_repeated_ones() -> None:
    assert streamed(["。", "。", "🛑"], ["你好", "。世界"])[:2] == ("你好", "。")
    assert streamed(["🛑"], ["go 🛑 on"])[:2] == ("go ", "🛑")


def test_nothing_may_follow_a_match() -> None:
    matcher = StopMatcher(["a"])
    matcher.push("a")
    with pytest.raises(AssertionError):
        matcher.push("b")


def test_work_is_linear_even_for_repetitive_text() -> None:
    """The automaton's state moves at most two steps per character, however often a beginning fails."""
    stop = "a" * 255 + "b"
    matcher = StopMatcher([stop])
    looked_at = 0

    class Counted(str):
        def __getitem__(self, index: object) -> str:
            nonlocal looked_at
            looked_at += 1
            return str.__getitem__(self, index)  # type: ignore[index]

    matcher._stop = [Counted(stop)]
    shown = "".join(matcher.push("a")[0] for _ in range(4000))
    assert shown == "a" * (4000 - 255)
    assert looked_at <= 4 * 4000
