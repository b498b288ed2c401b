import json

import pytest
from tokenizers import Tokenizer

from optimc.errors import CheckpointError
from optimc_passes.load.tokenizer_files import read_tokenizer

TEXT = "the quick brown fox, 123 ünïcode\n"


def read(folder):
    notes: list[str] = []
    return read_tokenizer(folder, notes), notes


def test_tokenizer_json_is_passed_on_byte_for_byte(folder):
    assets, notes = read(folder)
    assert assets.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert notes == []


def test_older_files_are_converted(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (folder / "tokenizer.json").unlink()
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(facts | {"tokenizer_class": "GPT2Tokenizer"}))
    assets, notes = read(folder)
    converted = Tokenizer.from_str(assets.tokenizer_json.decode())
    assert converted.encode(TEXT, add_special_tokens=False).ids == tokenizer.encode(TEXT).ids
    assert notes == ["there is no tokenizer.json; the older tokenizer files were converted"]


def test_no_tokenizer_is_none_and_said(folder):
    (folder / "tokenizer.json").unlink()
    assets, notes = read(folder)
    assert assets.tokenizer_json is None
    assert notes == ["the checkpoint has no tokenizer: only token ids can be served"]


def test_damaged_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        read(folder)


def test_older_files_nobody_can_convert_are_refused(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="tokenizer files cannot be converted"):
        read(folder)


def test_leftover_truncation_and_padding_are_switched_off(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    before = tokenizer.encode(TEXT).ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    assets, _ = read(folder)
    assert Tokenizer.from_str(assets.tokenizer_json.decode()).encode(TEXT).ids == before


def test_tokenizer_json_decides_about_bos_as_in_transformers(folder, tools):
    from transformers import AutoTokenizer

    tools.edit_json(folder / "tokenizer_config.json", add_bos_token=True)
    assets, _ = read(folder)
    ids = Tokenizer.from_str(assets.tokenizer_json.decode()).encode(TEXT).ids
    assert ids == AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]


# Chat templates.


def test_template_file_wins(folder):
    (folder / "chat_template.jinja").write_text("from file")
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert read(folder)[0].chat_template == "from file"


def test_template_json_comes_before_tokenizer_config(folder):
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert read(folder)[0].chat_template == "from json"


def test_base_model_has_no_template(folder, tools):
    tools.edit_json(folder / "tokenizer_config.json", chat_template=None)
    assert read(folder)[0].chat_template is None


@pytest.mark.parametrize(
    ("named", "expected"),
    [({"tool_use": "t", "default": "d"}, "d"), ({"only": "o"}, "o"), ({"a": "1", "b": "2"}, None)],
)
def test_named_templates(folder, tools, named, expected):
    templates = [{"name": name, "template": text} for name, text in named.items()]
    tools.edit_json(folder / "tokenizer_config.json", chat_template=templates)
    assets, notes = read(folder)
    assert assets.chat_template == expected
    assert notes == ([] if expected else ["no chat template is called default (there are a, b): none was taken"])


def test_malformed_templates_are_refused(folder, tools):
    tools.edit_json(folder / "tokenizer_config.json", chat_template=[{"name": "default"}])
    with pytest.raises(CheckpointError, match="neither text nor a list of named templates"):
        read(folder)


# Special tokens.


def test_special_tokens_come_from_both_files_and_both_spellings(folder, tools):
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"unk_token": {"content": "<|end|>"}, "bos_token": "<|old|>", "additional_special_tokens": ["x"]})
    )
    tools.edit_json(folder / "tokenizer_config.json", extra_special_tokens={"image_token": "<|pad|>"})
    assert read(folder)[0].special_tokens == {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "unk_token": "<|end|>",
        "image_token": "<|pad|>",
    }


def test_no_side_files_is_no_special_tokens(folder):
    (folder / "tokenizer_config.json").unlink()
    assert read(folder)[0].special_tokens == {}


def test_a_template_that_is_no_text_is_refused(folder):
    (folder / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: not UTF-8 text \(byte 2\)"):
        read(folder)
