"""Which arms a comparison needs, and which of them are twins (SPEC 11).

Owns the ladder reference -> eager -> eager_padded -> replay. A replayed arm is never held against
eager directly: padding may move its numbers within a budget, capture may not move a bit. Each
graph arm therefore brings the eager arm that is padded like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcpbench.modes import ARM_MODES, CUDAGraphMode

GRAPH_ARMS = ("piecewise", "full", "full_and_piecewise")
DEFAULT_PADDED_LIKE = "full"
MODES = {
    "NONE": "eager",
    "PIECEWISE": "piecewise",
    "FULL_DECODE_ONLY": "full",
    "FULL_AND_PIECEWISE": "full_and_piecewise",
}
"""The graph modes that a task run compares, and the arm that each is configured in."""


@dataclass(frozen=True)
class ArmSpec:
    """One arm to build: a one-rank reference, an eager engine (padded like a graph arm), a replay.

    mode: whose descriptors its batches are padded to. padded_like: label of that arm.
    """

    label: str
    mode: CUDAGraphMode
    is_reference: bool = False
    replays: bool = False
    padded_like: str | None = None


@dataclass(frozen=True)
class TwinPair:
    """A comparison: `kind` drift is arm against twin."""

    kind: str
    arm: str
    twin: str


@dataclass(frozen=True)
class Ladder:
    """Arms in the order they run a step, the pairs to compare, and the labels of the two asked."""

    arms: tuple[ArmSpec, ...]
    pairs: tuple[TwinPair, ...]
    base: str
    candidate: str


def padded_label(like: str) -> str:
    """The label of the eager arm that is padded exactly like a graph arm."""
    return f"eager_padded[{like}]"


def build_ladder(base: str, candidate: str) -> Ladder:
    """The arms and pairs of `compare BASE CANDIDATE`.

    `eager full` gives reference, eager, eager_padded[full], full, with partition, padding and
    capture drift along it. `eager_padded` on its own is padded like the other arm if that is a
    graph arm, else like `full`.
    """
    asked = (base, candidate)
    graphs = [arm for arm in asked if arm in GRAPH_ARMS]
    like = graphs[0] if graphs else DEFAULT_PADDED_LIKE
    padded = list(graphs) or ([like] if "eager_padded" in asked else [])
    arms, pairs = _rungs(padded, graphs)
    labels = {"eager_padded": padded_label(like)}
    return Ladder(
        arms=arms,
        pairs=pairs,
        base=labels.get(base, base),
        candidate=labels.get(candidate, candidate),
    )


def build_modes_ladder() -> Ladder:
    """The arms and pairs of a task run: all four graph modes, each graph arm with its twin."""
    arms, pairs = _rungs(GRAPH_ARMS, GRAPH_ARMS)
    return Ladder(arms=arms, pairs=pairs, base="eager", candidate=GRAPH_ARMS[-1])


def _rungs(
    padded: Sequence[str], graphs: Sequence[str]
) -> tuple[tuple[ArmSpec, ...], tuple[TwinPair, ...]]:
    """Reference and eager, then the padded twins of some graph arms, then graph arms."""
    arms = [ArmSpec("reference", CUDAGraphMode.NONE, is_reference=True)]
    arms.append(ArmSpec("eager", CUDAGraphMode.NONE))
    pairs = [TwinPair("partition", "eager", "reference")]
    for graph in padded:
        arms.append(ArmSpec(padded_label(graph), ARM_MODES[graph], padded_like=graph))
        pairs.append(TwinPair("padding", padded_label(graph), "eager"))
    for graph in graphs:
        arms.append(ArmSpec(graph, ARM_MODES[graph], replays=True))
        pairs.append(TwinPair("capture", graph, padded_label(graph)))
    return tuple(arms), tuple(pairs)
