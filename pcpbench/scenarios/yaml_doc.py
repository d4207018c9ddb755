"""YAML text to plain values with the line of each: the one module that knows YAML.

Owns the subset that scenario files may use: mappings, lists and plain scalars. Aliases, tags,
repeated keys, several documents and numbers that YAML 1.1 reads in surprising ways (010 is eight,
1:30 is ninety) are refused. Knows nothing of scenarios.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_DEPTH = 12
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,30})")
_TAG = "tag:yaml.org,2002:"


class YamlProblem(Exception):
    """Text that is no usable document; the message begins with the line where there is one."""


@dataclass
class Document:
    """Plain values and where each stands.

    lines: dotted path such as `requests[0].count` -> line, from 1.
    """

    value: Any = None
    lines: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> Document:
    """The document in `text`; raises YamlProblem with the line for everything else."""
    try:
        _check_events(text)
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise YamlProblem(f"{where}not valid YAML ({error.problem or error.context})") from error
    except yaml.reader.ReaderError as error:
        line = text[: max(error.position, 0)].count("\n") + 1
        raise YamlProblem(f"line {line}: not valid YAML ({error.reason})") from error
    document = Document()
    if node is not None:
        document.value = _plain(node, "", document.lines)
    return document


def _check_events(text: str) -> None:
    """Refuse what could blow up when built: aliases, deep nesting, a second document."""
    depth = num_documents = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = 1 if event.start_mark is None else event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise YamlProblem(f"line {line}: aliases (*{event.anchor}) are not read; write it out")
        if isinstance(event, yaml.DocumentStartEvent):
            num_documents += 1
            if num_documents > 1:
                raise YamlProblem(f"line {line}: a second document; keep one scenario in a file")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise YamlProblem(f"line {line}: nested more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _plain(node: yaml.Node, path: str, lines: dict[str, int]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, path, lines)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [_plain(item, f"{path}[{i}]", lines) for i, item in enumerate(node.value)]
    return _scalar(node)


def _mapping(node: yaml.MappingNode, path: str, lines: dict[str, int]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _TAG + "merge":
            raise YamlProblem(f"line {line}: a key must be a plain word")
        if key in result:
            raise YamlProblem(f"line {line}: the key {key!r} appears twice; keep one")
        child = f"{path}.{key}" if path else key
        lines[child] = line
        result[key] = _plain(value_node, child, lines)
    return result


def _scalar(node: yaml.Node) -> Any:
    line = node.start_mark.line + 1
    kind = node.tag.removeprefix(_TAG)
    text = node.value
    if not isinstance(node, yaml.ScalarNode):
        raise YamlProblem(f"line {line}: the tag {node.tag[:40]} is not read; leave it out")
    if kind == "str":
        control = next((c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\t"), "")
        if control:
            code = f"U+{ord(control):04X}"
            raise YamlProblem(
                f"line {line}: a text holds the control character {code}; leave it out"
            )
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("true", "yes", "on")
    if kind == "int":
        if _PLAIN_INT.fullmatch(text):
            return int(text)
        raise YamlProblem(f"line {line}: the number {text[:40]} must be written in plain decimals")
    if kind == "float":
        return _decimal(text, line)
    raise YamlProblem(
        f"line {line}: {str(text)[:40]!r} is a YAML {kind.lstrip('!')}; use plain text or a number"
    )


def _decimal(text: str, line: int) -> float:
    """YAML writes .nan and .inf; those are told apart later, by the range of the field."""
    try:
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        raise YamlProblem(
            f"line {line}: the number {text[:40]} must be written in plain decimals"
        ) from None
