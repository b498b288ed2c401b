import numpy as np

from optimc_passes.fuse.gather_rows_early import GatherRowsEarly
from optimc_passes.fuse.rule import NoOptions
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.probe import Probe

FUSE = GatherRowsEarly(NoOptions())
X = np.random.default_rng(0).standard_normal((1, 5, 4)).astype(np.float32)
ROWS = np.array([4, 0, 0])


def _graph(body: str, outputs: str = "float[1,R,4] y") -> str:
    return f"""rows (float[1,T,4] x, int64[R] rows) => ({outputs})
    <float[4] bias = {{1, 2, 3, 4}}, float[1,1,4] row = {{4, 3, 2, 1}}> {{
        {body}
    }}"""


def test_a_gather_moves_before_everything_that_only_it_reads(apply_rule):
    text = _graph("""a = Mul (x, row)
        b = Add (a, bias)
        c = Add (b, x)
        y = Gather <axis = 1> (c, rows)""")
    applied = apply_rule(GatherRowsEarly.rules, text)
    assert applied.times == 1
    assert [node.op_type for node in applied.after.graph] == ["Gather", "Mul", "Add", "Add"]
    applied.assert_equal(x=X, rows=ROWS)


def test_a_value_with_another_reader_is_where_the_rows_are_gathered(apply_rule):
    text = _graph(
        """a = Mul (x, row)
        b = Add (a, bias)
        y = Gather <axis = 1> (b, rows)""",
        outputs="float[1,R,4] y, float[1,T,4] a",
    )
    applied = apply_rule(GatherRowsEarly.rules, text)
    assert [node.op_type for node in applied.after.graph] == ["Mul", "Gather", "Add"]
    applied.assert_equal(x=X, rows=ROWS)


def test_operators_that_mix_rows_stop_it(apply_rule):
    text = _graph("""a = Softmax <axis = 1> (x)
        b = Mul (a, row)
        y = Gather <axis = 1> (b, rows)""")
    applied = apply_rule(GatherRowsEarly.rules, text)
    assert [node.op_type for node in applied.after.graph] == ["Softmax", "Gather", "Mul"]
    applied.assert_equal(x=X, rows=ROWS)


def test_rows_that_are_gathered_early_already_are_reported(apply_rule):
    applied = apply_rule(
        GatherRowsEarly.rules,
        _graph("a = Softmax <axis = 1> (x)\n y = Gather <axis = 1> (a, rows)"),
    )
    assert (applied.times, applied.report.already, applied.reason) == (0, 1, "")


def test_a_gather_of_features_declines(apply_rule):
    text = """features (float[1,T,4] x, int64[R] rows) => (float[1,T,R] y) {
        a = Mul (x, x)
        y = Gather <axis = 2> (a, rows)
    }"""
    applied = apply_rule(GatherRowsEarly.rules, text)
    assert (applied.times, applied.reason) == (0, "it gathers features, not rows")


def test_a_table_that_is_looked_up_is_no_place_for_it(apply_rule):
    text = """table (int64[R] rows) => (float[R,2] y) <float[2,2] table = {1, 2, 3, 4}> { y = Gather (table, rows) }"""
    applied = apply_rule(GatherRowsEarly.rules, text)
    assert (applied.times, applied.report.already, applied.reason) == (0, 0, "")


def test_the_end_of_a_decoder_works_on_the_asked_rows_alone(tiny_decoder, fused):
    result = fused(FUSE, tiny_decoder())
    assert result.metrics == {"matched": 1, "declined": 0}
    # One for what attention gives, one for the residual stream, and the embedding's.
    assert result.count("Gather") == 3
    narrow = [node for node in result.graph if "R" in [str(dim) for dim in node.outputs[0].shape]]
    assert sum(node.op_type == "MatMul" for node in narrow) == 5  # o, gate, up, down, head
    probe = Probe.of_vocabulary(48, 9).with_scattered_rows()
    before, after = (evaluate(model, probe) for model in (result.before, result.outcome.artifact.graph))
    assert np.array_equal(before, after)
    assert FUSE(result.outcome.artifact).report.metrics == {"matched": 0, "declined": 0}


def test_no_rows_at_all_are_computed_too(tiny_decoder, fused):
    """A step that only fills the cache asks for no logits."""
    graph = fused(FUSE, tiny_decoder()).outcome.artifact.graph
    empty = Probe(np.arange(4), np.zeros(0, np.int64))
    assert evaluate(graph, empty).shape == (0, 48)
