"""The recipe's JSON schema, for editors and for people who write recipes by program."""

from __future__ import annotations

from typing import Any

from optimc.recipe.model import PassConfigs, Recipe


def recipe_schema(pass_configs: PassConfigs) -> dict[str, Any]:
    """Return a JSON schema (2020-12) of the YAML as written: passes by name, the model as a string or a mapping."""
    schema = Recipe.model_json_schema()
    definitions = schema["$defs"]
    del definitions["PassSpec"]
    choices: list[dict[str, Any]] = []
    for name, config in sorted(pass_configs.items()):
        options = config.model_json_schema(ref_template="#/$defs/{model}")
        definitions |= options.pop("$defs", {})
        choices.append({"const": name, "description": options.get("description", "")})
        choices.append(
            {
                "type": "object",
                "properties": {name: {"anyOf": [options, {"type": "null"}]}},
                "required": [name],
                "additionalProperties": False,
            }
        )
    user_pass = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
    own = "A pass of your own, as module:Class; a file beside the recipe or an installed module."
    choices.append({"type": "string", "pattern": user_pass, "description": own})
    choices.append(
        {
            "type": "object",
            "patternProperties": {user_pass: {"type": ["object", "null"]}},
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
        }
    )
    properties = schema["properties"]
    properties["passes"] = {"type": "array", "items": {"anyOf": choices}, "default": []}
    properties["model"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/ModelSpec"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "optimc recipe"} | schema
