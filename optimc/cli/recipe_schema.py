"""`optimc recipe-schema`: the JSON schema of recipes."""

from __future__ import annotations

import json

import typer


def print_recipe_schema() -> None:
    """Print the JSON schema of recipes, for editors that complete and check YAML."""
    from optimc.build import pass_configs
    from optimc.recipe import recipe_schema

    typer.echo(json.dumps(recipe_schema(pass_configs()), indent=2))
