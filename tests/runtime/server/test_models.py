"""/v1/models tells what a client may ask of this server."""

from __future__ import annotations

import pytest

from optimc_runtime.server import ServerOptions
from optimc_runtime.stats import ProposerStats, SpeculationStats

HERMES = "{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}{{ messages }}"


def test_limits_are_the_engines_and_the_servers(start_server, engine, template, conforms):
    engine.max_request_tokens = 1024
    options = ServerOptions(max_prompt_tokens=500, max_output_tokens=200, max_choices=7)
    with start_server(engine, template, options) as served:
        listed = served.http.get("/v1/models").json()
        assert listed["data"] == [served.http.get("/v1/models/scripted").json()]
    conforms("ModelList", listed)
    [model] = listed["data"]
    limits = {name: value for name, value in model.items() if name.startswith("max_")}
    assert limits == {
        "max_model_len": 4096,
        "max_request_tokens": 1024,
        "max_prompt_tokens": 500,
        "max_output_tokens": 200,
        "max_seqs": 16,
        "max_choices": 7,
    }
    assert model["vocab_size"] == 272


@pytest.mark.parametrize(
    ("source", "supports_tools", "tools"),
    [(HERMES, True, True), (HERMES, False, False), ("{{ tools }}{{ messages }}", True, False), (None, False, False)],
)
def test_tools_are_there_if_the_template_shows_them_in_a_format_we_read(
    start_server, engine, template, source, supports_tools, tools
):
    if source is not None:
        template.source, template.supports_tools = source, supports_tools
    with start_server(engine, None if source is None else template, ServerOptions()) as served:
        model = served.http.get("/v1/models/scripted").json()
    assert (model["chat"], model["tools"]) == (source is not None, tools)


def test_who_guesses_is_named(served):
    assert served.http.get("/v1/models/scripted").json()["speculation"] == []
    figures = ProposerStats(1, 1, 1)
    served.engine.speculation = SpeculationStats("auto", True, {"ngram": figures, "draft": figures}, (), (), 1, 1, 0.0)
    assert served.http.get("/v1/models/scripted").json()["speculation"] == ["draft", "ngram"]
