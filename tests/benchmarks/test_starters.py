import pytest
from peer.names import LLAMA, LLAMA_SERVER, OPENVINO, ORT_GENAI
from peer.places import Peers
from peer.samples import Samples
from peer.starters import Starter, for_one_request, for_sixteen_requests, set_up


@pytest.fixture
def peers(tmp_path):
    return Peers(tmp_path)


def make(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_a_peer_is_started_if_its_program_and_its_model_are_there(peers):
    make(peers.python)
    make(peers.ort_genai_model("smollm2"))
    make(peers.llama_tool("llama-bench"))
    samples = Samples()
    assert list(set_up(for_one_request(peers, "smollm2"), peers, samples)) == [ORT_GENAI]
    assert samples.notes == [
        "llama.cpp: not set up (models/smollm2-q4_0.gguf missing)",
        "OpenVINO: not set up (models/smollm2-ov missing)",
    ]


def test_each_model_is_looked_for_by_itself(peers):
    make(peers.python)
    make(peers.openvino_model("smollm2"))
    assert list(set_up(for_one_request(peers, "smollm2"), peers, Samples())) == [OPENVINO]
    assert not set_up(for_one_request(peers, "llama-587m"), peers, Samples())


def test_all_that_an_empty_folder_lacks_is_named(peers):
    samples = Samples()
    assert not set_up(for_sixteen_requests(peers), peers, samples)
    assert samples.notes == [
        "llama-server: not set up (llama.cpp/build/bin/llama-server, models/smollm2-q4_0.gguf missing)",
        "OpenVINO: not set up (run/bin/python, models/smollm2-ov missing)",
        "onnxruntime-genai: not set up (run/bin/python, models/smollm2-ort missing)",
    ]


def test_every_peer_is_named_in_the_order_of_the_table(peers):
    assert list(for_one_request(peers, "smollm2")) == [LLAMA, OPENVINO, ORT_GENAI]
    assert list(for_sixteen_requests(peers)) == [LLAMA_SERVER, OPENVINO, ORT_GENAI]


def test_starting_hands_over_program_and_model(tmp_path):
    assert Starter(lambda *paths: paths, tmp_path / "program", tmp_path / "model")() == (
        tmp_path / "program",
        tmp_path / "model",
    )
