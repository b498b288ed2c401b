"""The built-in text: the topics of Python's own help system, split into calibration and evaluation.

Both splits come from `pydoc_data.topics` sorted by name: every fourth topic, beginning with the first, is for
evaluation, all others are for calibration, so no text is in both. The text belongs to the running Python version.
"""

from __future__ import annotations

from pydoc_data.topics import topics

NAME = "python-docs"
_EVALUATION_STRIDE = 4


def calibration_texts() -> list[str]:
    """Return the topics for calibration, in order of their names."""
    return [topics[name] for number, name in enumerate(sorted(topics)) if number % _EVALUATION_STRIDE]


def evaluation_texts() -> list[str]:
    """Return the topics for evaluation, in order of their names."""
    return [topics[name] for name in sorted(topics)[::_EVALUATION_STRIDE]]
