"""From a recipe to an engine.plan: the pass pipeline, its cache and the plan writer."""

from optimc.build.build import BuildResult, build_recipe
from optimc.build.export import ExportResult, export_recipe
from optimc.build.inputs import BuildInputs, BuildOptions, pass_configs, read_inputs, require_compiler
from optimc.build.outline import BuildOutline, plan_build

__all__ = [
    "BuildInputs",
    "BuildOptions",
    "BuildOutline",
    "BuildResult",
    "ExportResult",
    "build_recipe",
    "export_recipe",
    "pass_configs",
    "plan_build",
    "read_inputs",
    "require_compiler",
]
