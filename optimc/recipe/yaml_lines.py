"""YAML with line numbers: parsed data plus, for every path in it, the line it was written on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from optimc.errors import ConfigError, Fault
from optimc.wording import one_line

YamlPath = tuple[str | int, ...]

MAX_NODES = 100_000
"""Aliases can make a short file describe a huge tree; no recipe is that large."""


_REPLACED = frozenset({"int", "float", "bool", "timestamp"})


class _Loader(yaml.SafeLoader):
    """SafeLoader, but with YAML 1.2's idea of a scalar: `1e-3`, `010` (ten) are numbers; `on`, `1:30`, a date words."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class-level table, rebuilt rather than changed in place
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _integer(loader: _Loader, node: yaml.Node) -> int:
    text = str(loader.construct_scalar(node))  # type: ignore[arg-type]
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
# Before the float, whose pattern takes integers too.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"(?:[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+.0123456789"),
)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


@dataclass(frozen=True)
class LinedYaml:
    """Parsed YAML. `line_of` finds the line of the innermost part of a path that was written down."""

    data: Any
    lines: dict[YamlPath, int] = field(repr=False)
    duplicates: tuple[Fault, ...] = ()

    def line_of(self, path: YamlPath) -> int | None:
        """Return the 1-based line of `path`, or of its closest ancestor."""
        for end in range(len(path), -1, -1):
            line = self.lines.get(path[:end])
            if line is not None:
                return line
        return None


def parse_yaml(text: str, source: str) -> LinedYaml:
    """Parse one YAML document. Raises ConfigError with the line if it is not YAML."""
    try:
        # Looks at the characters at once, and refuses those no YAML may hold.
        loader = _Loader(text)
    except yaml.YAMLError as error:
        raise ConfigError(source, [Fault("", f"not valid YAML: {one_line(error)}")]) from error
    try:
        root = loader.get_single_node()
        if root is None:
            return LinedYaml({}, {(): 1})
        lines: dict[YamlPath, int] = {}
        duplicates: list[Fault] = []
        _walk(root, (), lines, duplicates)
        return LinedYaml(loader.construct_document(root), lines, tuple(duplicates))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise ConfigError(source, [Fault("", f"not valid YAML: {error.problem}", line)]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(source, [Fault("", f"not valid YAML: {one_line(error)}")]) from error
    finally:
        loader.dispose()


def _walk(node: yaml.Node, path: YamlPath, lines: dict[YamlPath, int], duplicates: list[Fault]) -> None:
    if len(lines) > MAX_NODES:
        raise ValueError(f"more than {MAX_NODES} entries")
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in seen:
                duplicates.append(Fault(format_path((*path, key)), "given twice", line))
            seen.add(key)
            _walk(value_node, (*path, key), lines, duplicates)
            lines[(*path, key)] = line
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*path, index), lines, duplicates)


def format_path(path: YamlPath) -> str:
    """Write ("passes", 1, "rtn", "bits") as `passes[1].rtn.bits`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
