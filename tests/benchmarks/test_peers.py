import pytest
from peer.names import OPTIMC, ORT_GENAI, RESIDENT
from peer.samples import Samples
from peers import _options, _report


def test_the_peers_folder_has_to_exist(tmp_path, capsys):
    with pytest.raises(SystemExit):
        _options(["--peers", str(tmp_path / "nowhere")])
    assert "setup.sh" in capsys.readouterr().err
    assert _options(["--peers", str(tmp_path)]).peers == tmp_path.resolve()


def test_sections_are_chosen_by_name_and_run_in_their_order(tmp_path, capsys):
    assert _options(["--peers", str(tmp_path), "--sections", "footprint,decode"]).sections == ["decode", "footprint"]
    with pytest.raises(SystemExit):
        _options(["--peers", str(tmp_path), "--sections", "footprnt"])
    assert "unknown: footprnt; known: decode" in capsys.readouterr().err


def test_the_report_has_a_row_for_every_metric_and_says_who_was_missing():
    samples = Samples({RESIDENT: {OPTIMC: [310.0], ORT_GENAI: [400.0]}}, notes=["OpenVINO: not set up (x missing)"])
    section = samples.to_json() | {"measured": "today", "machine": "here"}
    text = _report({"sections": {"footprint": section}})
    assert "## footprint\n" in text
    assert f"| | optimc | onnxruntime-genai |\n| --- | ---: | ---: |\n| {RESIDENT} | 310 | 400 |" in text
    assert "- OpenVINO: not set up (x missing)" in text
