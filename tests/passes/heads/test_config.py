"""What recipes may say of heads, and what is refused in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from optimc.errors import ConfigError
from optimc_passes.heads.config import HeadsData, MedusaConfig
from optimc_passes.registry import make_pass

README = Path(__file__).parents[3] / "passes" / "README.md"


def refused(**options):
    with pytest.raises(ConfigError) as caught:
        make_pass("medusa", options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("chains", "'chains' is neither auto nor chain:N"),
        ("chain:0", "'chain:0' is neither"),
        ([], "0 nodes, want 1 to 64"),
        ([[]], "the root is not listed"),
        ([[0], [1, 0]], "[1, 0] hangs at [1], which is not listed"),
        ([[0], [0]], "[0] is listed twice"),
        ([[10]], "ranks are 0 to 9, got [10]"),
        ("chain:4", "it is 4 deep and there are 3 heads"),
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "it is 4 deep and there are 3 heads"),
    ],
)
def test_a_tree_that_is_none_is_refused(tree, words):
    assert words in refused(heads=3, tree=tree)


@pytest.mark.parametrize("tree", ["auto", "chain:2", [[0], [1], [0, 0]], [[0, 0], [0]]])
def test_trees_are_taken(tree):
    assert make_pass("medusa", {"tree": tree}).config.tree == tree


def test_heads_are_taken_over_as_they_are():
    assert "from: heads are taken over as they are; leave out heads, minutes" in refused(
        **{"from": "heads", "heads": 2, "minutes": 1}
    )
    assert make_pass("medusa", {"from": "heads", "bits": 4, "tree": "chain:9"}).config.depth == 9


def test_there_must_be_text():
    assert "no tokens to train on" in refused(data={"chat_tokens": 0, "prose_tokens": 0})
    assert make_pass("medusa", {}).uses_calibration
    assert not make_pass("medusa", {"data": {"prose_tokens": 0}}).uses_calibration


def test_a_draft_vocabulary_of_next_to_nothing_is_refused():
    assert "8 tokens are too few" in refused(draft_vocab=8)
    assert make_pass("medusa", {"draft_vocab": "all"}).config.draft_vocab == "all"


def test_options_are_told_under_the_names_recipes_use():
    described = make_pass("medusa", {"heads": 2}).describe_config()
    assert described["from"] is None
    assert "from_" not in described
    assert make_pass("medusa", described).describe_config() == described
    assert "known: batch_tokens, bits, blocks, conditioned, data, draft_vocab, epochs, from, heads" in refused(
        from_="x"
    )


def test_every_option_is_in_the_readme():
    section = README.read_text().partition("## Heads")[2].partition("\n## ")[0]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^\| (`.*?`) \| ", section, re.MULTILINE))))
    fields = {field.alias or name for name, field in MedusaConfig.model_fields.items()}
    assert fields | set(HeadsData.model_fields) == named
