"""Nodes as one Python function without a loop: every callable and argument is a global name.

Owns the text of that function; does not know what the nodes compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pcpbench.device.host_graph.statement import Call, Node

_LITERALS = (int, bool, type(None))


def compile_nodes(nodes: Sequence[Node]) -> tuple[Callable[[], None], dict[int, Node]]:
    """A function that runs the nodes in order, and which node each line of it belongs to."""
    names: dict[str, Any] = {}
    lines = ["def run():"]
    node_at: dict[int, Node] = {}
    for node in nodes:
        for statement in node.statements:
            text = _call_text(statement.call, names)
            if statement.keeps:
                lines.append(f"    result = {text}")
                node_at[len(lines)] = node
            else:
                lines.append(f"    {text}")
                node_at[len(lines)] = node
            for keep in statement.keeps:
                copy = _named(keep.record.copy_, names)
                index = "".join(f"[{at}]" for at in keep.path)
                if statement.shapes_may_change:
                    check, record = _named(_same_shape, names), _named(keep.record, names)
                    lines.append(f"    {check}(result{index}, {record})")
                    node_at[len(lines)] = node
                lines.append(f"    {copy}(result{index})")
                node_at[len(lines)] = node
    lines.append("    return None")
    exec(compile("\n".join(lines), "<host graph>", "exec"), names)
    run: Callable[[], None] = names["run"]
    return run, node_at


def _same_shape(result: torch.Tensor, record: torch.Tensor) -> None:
    """Raise where an operator made another shape than at capture, which a graph has baked."""
    if result.shape != record.shape:
        raise RuntimeError(
            f"the result has shape {list(result.shape)}, and had {list(record.shape)} at capture"
        )


def _call_text(call: Call, names: dict[str, Any]) -> str:
    args = [_value_text(each, names) for each in call.args]
    args += [f"{name}={_value_text(each, names)}" for name, each in call.kwargs.items()]
    return f"{_named(call.fn, names)}({', '.join(args)})"


def _value_text(value: Any, names: dict[str, Any]) -> str:
    return repr(value) if type(value) in _LITERALS else _named(value, names)


def _named(value: Any, names: dict[str, Any]) -> str:
    name = f"v{len(names)}"
    names[name] = value
    return name
