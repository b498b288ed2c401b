import onnx_ir as ir

from optimc_passes.fuse.remove_dead_nodes import RemoveDeadNodes
from optimc_passes.fuse.rule import NoOptions

REMOVE = RemoveDeadNodes(NoOptions())


def test_what_nobody_reads_goes_with_what_only_that_read(tiny_decoder, fused):
    decoder = tiny_decoder(layers=1)
    graph = decoder.model.graph
    norm = next(node for node in graph if node.op_type == "RMSNormalization")
    dead = ir.node("Abs", [norm.outputs[0]], outputs=[ir.Value(name="dead")])
    deader = ir.node("Neg", dead.outputs, outputs=[ir.Value(name="deader")])
    graph.insert_after(norm, [dead, deader])
    size = len(graph)
    result = fused(REMOVE, decoder)
    assert result.metrics == {"matched": 2, "declined": 0}
    assert (result.count("Abs"), result.count("Neg")) == (0, 0)
    assert result.outcome.report.fusion.matched == 2
    assert result.error == 0
    assert len(graph) == size, "the graph that was handed in stays as it is"


def test_a_second_time_there_is_nothing(tiny_decoder, fused):
    result = fused(REMOVE, tiny_decoder(layers=1))
    again = REMOVE(result.outcome.artifact)
    assert again.report.metrics == {"matched": 0, "declined": 0}
    assert again.report.decisions == ("nothing to do: every node is read",)
