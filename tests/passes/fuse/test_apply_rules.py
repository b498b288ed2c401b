"""What every rule can rely on: names, constants, order, dead nodes, and a record of what happened."""

import numpy as np
import onnx_ir as ir
import pytest

from optimc_passes.fuse.apply_rules import apply_rules
from optimc_passes.fuse.constants import make_ints
from optimc_passes.fuse.recorder import Recorder
from optimc_passes.fuse.rule import ACCEPTED, Rule, declined

X = np.array([1.0, -2.0, 3.0], np.float32)


class NegOfNeg(Rule):
    """-(-x) is x."""

    def pattern(self, op, x):
        return op.Neg(op.Neg(x))

    def rewrite(self, op, x):
        return op.Identity(x)


class AbsAsMax(Rule):
    """Three nodes for one, with a name of its own for one of them."""

    def pattern(self, op, x):
        return op.Abs(x, _outputs=["positive"])

    def check(self, _context, x, positive):
        if x.is_graph_input():
            return declined("it is an input", x)
        return ACCEPTED

    def rewrite(self, op, x, **_):
        negated = op.Neg(x, _outputs=["sign"])
        return op.Max(op.Reshape(x, make_ints(op, 3)), negated)


def _model(body: str, outputs: str = "float[3] y") -> str:
    return f"""m (float[3] x) => ({outputs}) <int64[1] three = {{3}}> {{
        {body}
    }}"""


def test_the_root_keeps_its_name_and_what_nobody_reads_is_gone(apply_rule):
    applied = apply_rule(NegOfNeg, _model("a = Neg (x)\n b = Neg (a)\n y = Sqrt (b)"))
    assert [node.outputs[0].name for node in applied.after.graph] == ["b", "y"]


def test_a_value_inside_with_another_reader_keeps_the_pattern_where_it_is(apply_rule):
    applied = apply_rule(NegOfNeg, _model("a = Neg (x)\n y = Neg (a)", "float[3] y, float[3] a"))
    assert (applied.times, applied.reason) == (0, "a value inside the pattern has a reader outside")


def test_new_values_have_the_names_they_were_given_or_speaking_ones(apply_rule):
    applied = apply_rule(AbsAsMax, _model("a = Sqrt (x)\n b = Abs (a)\n c = Abs (b)\n y = Neg (c)"))
    assert applied.times == 2
    names = [node.outputs[0].name for node in applied.after.graph]
    assert len(set(names)) == len(names)
    assert {"a", "sign", "Reshape", "b", "sign_2", "Reshape_2", "c", "y"} == set(names)
    applied.assert_equal(x=np.abs(X))


def test_equal_constants_are_stored_once(apply_rule):
    applied = apply_rule(AbsAsMax, _model("a = Sqrt (x)\n b = Abs (a)\n c = Abs (b)\n y = Reshape (c, three)"))
    assert list(applied.after.graph.initializers) == ["three"]
    assert "Constant" not in applied.operators


def test_what_a_rewrite_builds_is_not_matched_again(apply_rule):
    class Twice(Rule):
        """A rule that would never end."""

        def pattern(self, op, x):
            return op.Neg(x)

        def rewrite(self, op, x):
            return op.Neg(op.Neg(op.Neg(x)))

    assert apply_rule(Twice, _model("y = Neg (x)")).operators == {"Neg": 3}


def test_an_output_of_the_graph_needs_a_node(apply_rule):
    class Leave(Rule):
        """Gives back what is there."""

        def pattern(self, op, x):
            return op.Neg(x)

        def rewrite(self, op, x):
            return x

    with pytest.raises(ValueError, match="Leave: an output of the graph needs a node of its own; emit an Identity"):
        apply_rule(Leave, _model("y = Neg (x)"))


def test_rules_see_the_work_of_those_before_them(apply_rule):
    text = _model("a = Sqrt (x)\n b = Abs (a)\n y = Abs (b)")

    class MaxAsMin(Rule):
        """For what the other rule leaves."""

        def pattern(self, op, a, b):
            return op.Max(a, b)

        def rewrite(self, op, a, b):
            return op.Min(a, b)

    assert apply_rule((AbsAsMax, MaxAsMin), text).operators["Min"] == 2
    assert apply_rule((MaxAsMin, AbsAsMax), text).operators["Min"] == 0


def test_progress_ends_with_all_done():
    model = ir.from_onnx_text('<ir_version: 10, opset_import: ["" : 23]>\n' + _model("y = Neg (x)"))
    seen = []
    apply_rules(model, [NegOfNeg.compiled()], Recorder(), lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 1)
    assert seen[-1] == (1, 1)


def test_the_record_names_reasons_places_and_the_nearest_miss(apply_rule):
    applied = apply_rule(AbsAsMax, _model("a = Abs (x)\n b = Abs (x)\n y = Add (a, b)"))
    (entry,) = applied.report.declined
    assert (entry.reason, entry.sites, entry.first) == ("it is an input", 2, "a")
    near = applied.report.nearest
    assert (near.op, near.matched_nodes, near.reason) == ("Abs", 1, "it is an input")
    assert near.surroundings == (
        "-> a = Abs(x) : [3]",
        "   y = Add(a, b) : [3]",
    )


def test_a_pattern_that_fits_in_part_is_the_nearest_miss_of_a_rule_that_never_fits(apply_rule):
    applied = apply_rule(NegOfNeg, _model("a = Sqrt (x)\n y = Neg (a)"))
    assert applied.report.declined == ()
    near = applied.report.nearest
    assert (near.matched_nodes, near.reason) == (1, "OpType mismatch: expected Neg, got Sqrt.")
    assert near.node == "a"
