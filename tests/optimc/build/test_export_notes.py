"""What of a recipe an export leaves out, and says so."""

from __future__ import annotations

from types import SimpleNamespace

from optimc.build.export import _left_out
from optimc_passes.registry import make_pass


def test_heads_are_left_out_of_a_checkpoint():
    passes = (make_pass("rtn"), make_pass("swiglu"), make_pass("medusa"))
    notes = _left_out(SimpleNamespace(passes=passes))
    assert len(notes) == 2
    assert notes[1].startswith("medusa was not run: heads are trained for what a target computes")
    assert _left_out(SimpleNamespace(passes=passes[:1])) == []
