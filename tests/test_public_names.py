"""What a package offers is what its `__all__` says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(
    path
    for source in ("optimc", "passes/optimc_passes", "runtime/optimc_runtime")
    for path in (ROOT / source).rglob("__init__.py")
)


def offered(module):
    """Names that module-level statements bind without an underscore; imports of other projects are tools."""
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0].startswith("optimc"):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if not target.id.startswith("_"))


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.name)
def test_public_names_equal_all(path):
    module = ast.parse(path.read_text())
    named = [
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    ]
    public = [name for name in (named[0] if named else []) if not name.startswith("__")]
    assert sorted(offered(module)) == sorted(public)
