"""Stop strings: found across increments, held back while they may still be forming."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches streamed text for the first stop string to complete.

    Text that could still turn out to begin a stop string is held back; what `push` returns is safe to show. The stop
    string that *completes* first wins (the longest one, if several complete at the same character), so the answer
    does not depend on how the text was cut into increments, and generation can end at once. Each character costs a
    constant number of automaton steps (Knuth, Morris & Pratt 1977), whatever the length of the text.
    """

    __slots__ = ("_borders", "_done", "_first_chars", "_held", "_matched", "_stop")

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), "an empty stop string would match everywhere"
        # Longest first: among strings that complete together the one that starts earliest decides the cut.
        self._stop = sorted(dict.fromkeys(stop), key=len, reverse=True)
        self._borders = [_borders(text) for text in self._stop]
        self._first_chars = {text[0] for text in self._stop}
        self._matched = [0] * len(self._stop)
        self._held = ""
        self._done = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Take an increment; return the text now safe to show and the stop string that was found, if any.

        The stop string itself and everything after it are dropped; nothing may be pushed after a match.
        """
        assert not self._done, "a stop string was already found"
        if not self._held and self._first_chars.isdisjoint(text):
            return text, None
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            found = self._step(buffer[position])
            if found is not None:
                self._done = True
                self._held = ""
                return buffer[: position + 1 - len(found)], found
        safe = len(buffer) - max(self._matched)
        self._held = buffer[safe:]
        return buffer[:safe], None

    def flush(self) -> str:
        """Return what was held back: the text has ended and no stop string came of it."""
        held, self._held = self._held, ""
        self._done = True
        return held

    def _step(self, char: str) -> str | None:
        for index, stop in enumerate(self._stop):
            matched = self._matched[index]
            borders = self._borders[index]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop):
                return stop
        return None


def _borders(text: str) -> list[int]:
    """Return, for every prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        if text[index] == text[length]:
            length += 1
        borders[index] = length
    return borders
