"""With a plan: prompts are what its template and tokenizer make of them, and killers are the same as without."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from optimc.errors import ConfigError
from optimc.measure.load.traffic import TrafficLine
from optimc.measure.prefix.plan_rendering import PlanRendering
from optimc.measure.prefix.prefix_report import prefix_report
from optimc_runtime.chat_template import ChatTemplate
from optimc_runtime.tokenizer import Tokenizer

NOW_S = 1_795_000_000.0
TEMPLATE = (
    "<s>{% if tools %}Tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}\n{% endfor %}[assistant]\n"
)


def rendering_of(template):
    """One token per byte: ids are easily counted."""
    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PlanRendering(
        Tokenizer(backend.to_str().encode()), backend, None if template is None else ChatTemplate(template)
    )


@pytest.fixture(scope="module")
def rendering():
    return rendering_of(TEMPLATE)


def test_spans_cover_the_prompt_and_name_its_fields(rendering):
    tools = ({"type": "function", "function": {"name": "look", "description": "Looks."}},)
    messages = ({"role": "system", "content": " Be kind. "}, {"role": "user", "content": "Why?"})
    rendered = rendering(TrafficLine(messages=messages, tools=tools))
    assert [span.start for span in rendered.spans[1:]] == [span.end for span in rendered.spans[:-1]]
    said = {span.path: rendered.text[span.start : span.end] for span in rendered.spans if span.path != "template"}
    assert said["messages[0].content"] == "Be kind."
    assert said["messages[1].content"] == "Why?"
    assert said["tools[0].function.name"] == '"look"'
    assert len(rendered.units) == len(rendered.text) == rendered.prompt_tokens


def test_characters_of_several_tokens_keep_their_places(rendering):
    # é is two bytes, hence two tokens, which both begin at its character.
    rendered = rendering(TrafficLine(messages=({"role": "user", "content": "aéb"},)))
    at = rendered.text.index("é")
    assert rendered.unit_at(at + 1) - rendered.unit_at(at) == 2
    assert rendered.char_at(rendered.unit_at(at + 1)) == at + 1


def test_logged_ids_are_read_back_as_the_text_they_stand_for(rendering):
    line = TrafficLine(messages=({"role": "user", "content": "Why?"},))
    rendered = rendering(line)
    again = rendering(TrafficLine(messages=line.messages, prompt_ids=tuple(rendered.units.tolist())))
    assert (again.text, again.spans) == (rendered.text, rendered.spans)


@pytest.mark.parametrize("kind", ["timestamp", "id", "tool_order", "key_order", "user_before_shared", "whitespace"])
def test_a_planted_killer_is_named_as_it_is_without_a_plan(rendering, traffic, kind):
    lines = traffic.planted(1, [kind], 60)
    without = prefix_report(lines, now_s=NOW_S)
    report = prefix_report(lines, rendering=rendering, now_s=NOW_S)
    assert [(k.kind, k.path) for k in report.killers] == [(k.kind, k.path) for k in without.killers]
    assert [k.kind for k in report.killers] == [kind]
    assert (report.is_estimated, without.is_estimated) == (False, True)


@pytest.mark.parametrize("seed", range(5))
def test_clean_traffic_has_no_killer(rendering, traffic, seed):
    assert prefix_report(traffic.clean(seed, 80), rendering=rendering, now_s=NOW_S).killers == ()


def test_a_template_that_writes_what_changes_is_named(traffic):
    # A date in the template shows in logged ids only: rendered now, all have the same.
    lines = []
    for number, line in enumerate(traffic.clean(1, 30)):
        dated = rendering_of(f"Day {number:02}." + TEMPLATE)(line)
        lines.append(TrafficLine(number=number, messages=line.messages, prompt_ids=tuple(dated.units.tolist())))
    report = prefix_report(lines, rendering=rendering_of(TEMPLATE), now_s=NOW_S)
    assert {(killer.kind, killer.path) for killer in report.killers} == {("template_drift", "template")}


def test_conversations_without_a_template_are_refused(traffic):
    with pytest.raises(ConfigError, match="has no chat template"):
        prefix_report(traffic.clean(1, 3), rendering=rendering_of(None), now_s=NOW_S)
