from peer.machine_probe import MachineState
from peer.names import DECODE, LLAMA, OPENVINO, OPTIMC
from peer.samples import Samples
from peer.table import report, spread
from peer.targets import judge


def test_the_report_says_what_was_reached_and_in_which_state():
    values = {DECODE: {OPTIMC: [400.0, 420.0], LLAMA: [200.0, 210.0], OPENVINO: [200.0, 220.0]}}
    samples = Samples(
        values, [MachineState(35.2, 34.9), MachineState(298.0, 60.1)], {"openvino": "1"}, {LLAMA: "bench"}
    )
    text = report("Title", "a machine", {"decode": "today"}, {"decode": samples}, judge({"decode": samples}))
    assert f"| {DECODE}, over llama.cpp | ≥ 1.5× | 2 | ✓ pass |" in text
    assert f"| {DECODE}, over OpenVINO | ≥ 2.5× | 1.95 | ✗ fail |" in text
    assert f"| {DECODE} | 410 (400–420) | 205 (200–210) | 210 (200–220) |" in text
    assert "barrier 35, 298 ns; reads 35, 60 GB/s" in text
    assert "not measured" in text


def test_one_value_has_no_spread():
    assert spread([0.00123456]) == "0.001235"
    assert spread([]) == "–"
    assert spread([12345.6, 12345.6]) == "12346 (12346–12346)"
