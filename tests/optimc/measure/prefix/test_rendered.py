"""A line of traffic as the text a cache sees: what is a field's and what is the template's."""

import pytest

from optimc.measure.load.traffic import TrafficLine
from optimc.measure.prefix.rendered import render
from optimc.measure.prefix.span import TEMPLATE


@pytest.mark.parametrize("bos", ["<s>", "<s><s>", "<bos>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>"])
def test_marks_before_a_prompt_are_the_templates(bos):
    rendered = render(TrafficLine(prompt=f"{bos}Once"))
    assert [(span.start, span.path) for span in rendered.spans] == [(0, TEMPLATE), (len(bos), "prompt")]


@pytest.mark.parametrize("prompt", ["<html>", "> quoted", "<| once", "<sub>"])
def test_a_prompt_that_begins_with_a_bracket_is_the_prompts_own_from_there(prompt):
    assert [(span.start, span.path) for span in render(TrafficLine(prompt=prompt)).spans] == [(0, "prompt")]


def test_blocks_are_equal_where_their_hashes_are_however_large_these_are():
    def units(*hashes):
        return render(TrafficLine(prompt_tokens=600, hash_ids=hashes)).units.tolist()

    assert units(2**64, -5) == units(2**64, -5)
    assert units(2**64, 7)[:512] == units(2**64, 8)[:512]
    assert units(2**64, 7)[512:] != units(2**64, 8)[512:]
    assert units(-5, 7)[:512] != units(2**64, 7)[:512]
    assert len(units(2**64, -5)) == 600
    assert all(unit >= 0 for unit in units(-5, 2**64))
