"""The steps of a comparison as a Chrome trace, which Perfetto and chrome://tracing open.

Owns the shape of the events. A process of the trace is an arm, a thread is a rank. What is done for
all ranks at once (a replay and its launches, dispatch) stands on every rank's thread with
`"shared": true`, so that each thread shows a whole step: do not add such times up over the ranks.
Format: the JSON object form of the Trace Event Format; times in microseconds.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pcpbench import __version__
from pcpbench.errors import CannotMeasure, UsageError
from pcpbench.report.stored import Row, StoredRun, damaged
from pcpbench.report.stored_compare import StoredCompare

MARK: Final = '{"pcpbench_trace": 1,'
"""How every trace begins; a file that does not is none of ours and is never written over."""

GAP_US: Final = 1000.0
"""Free space between two scenarios."""

THREADS: Final = 1000
"""Numbers of threads that each process has to itself; more than an arm can have ranks."""

NOTE: Final = (
    "The first steps of each scenario, run once more and watched after the timed repetitions; "
    "these times are in no statistic. The arms take turns step by step. All ranks are in one "
    "process and run one after the other, in lockstep from collective to collective: a rank's "
    "forward pass is as many events as it had turns, and what runs for all ranks at once is on "
    "every rank's thread with shared = true."
)
_STEP_FACTS: Final = ("served_as", "miss_reason", "descriptor_num_tokens", "num_reqs", "num_tokens")

Event = dict[str, Any]


def render_trace(run: StoredRun) -> str:
    """The trace of a run as JSON text, one event a line.

    Raises UsageError for a run of another command or with damaged times, and CannotMeasure for one
    without phases.
    """
    if run.command != "compare":
        raise UsageError(
            f"{str(run.path)!r} is a run of `pcpbench {run.command}`: only `pcpbench compare` "
            "records the phases of its steps."
        )
    compare = StoredCompare(run)
    rows = compare.rows("phases.csv")
    if not rows:
        raise CannotMeasure(
            f"{str(run.path)!r} has no phases: run `pcpbench compare` of this version with "
            "--repetitions above 0, and see that a scenario passes."
        )
    events = [*_names(compare), *_events(compare)]
    head = {
        "run": run.name,
        "pcpbench_version": __version__,
        "arms": list(compare.asked),
        "num_ranks": compare.num_ranks,
        "note": NOTE,
    }
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
    other = json.dumps(head, allow_nan=False)
    return (
        f'{MARK}\n"displayTimeUnit": "ms",\n"otherData": {other},\n"traceEvents": [\n{lines}\n]}}\n'
    )


def _names(run: StoredCompare) -> Iterator[Event]:
    for pid, arm in enumerate(run.asked, 1):
        first = thread_id(pid, 0)
        yield _meta("process_name", pid, first, {"name": f"arm {arm}"})
        yield _meta("process_sort_index", pid, first, {"sort_index": pid})
        for rank in range(run.num_ranks_of(arm)):
            yield _meta("thread_name", pid, thread_id(pid, rank), {"name": f"rank {rank}"})


def thread_id(pid: int, rank: int) -> int:
    """A number that no other thread and no process of the trace has.

    Perfetto takes thread 0, and one with its process's number, for that process's main thread, and
    draws both as one.
    """
    return THREADS * pid + rank


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _events(run: StoredCompare) -> Iterator[Event]:
    """Events sorted by thread and time, an enclosing one before what is in it."""
    pids = {arm: pid for pid, arm in enumerate(run.asked, 1)}
    ranks = {arm: range(run.num_ranks_of(arm)) for arm in run.asked}
    events: dict[tuple[int, int], list[Event]] = defaultdict(list)
    begin, file = 0.0, run.run.path / "phases.csv"
    for scenario in run.scenarios:
        end = begin
        ran = {
            (row.text("arm"), row.text("step")): row for row in run.rows("steps.csv", scenario.name)
        }
        for row in run.rows("phases.csv", scenario.name):
            arm, rank = row.text("arm"), row.whole("rank")
            if arm not in pids:
                continue
            event = _event(row, begin, ran.get((arm, row.text("step"))), file)
            end = max(end, event["ts"] + event["dur"])
            shared = rank is None and len(ranks[arm]) > 1
            for number in ranks[arm] if rank is None else (rank,):
                pid, tid = pids[arm], thread_id(pids[arm], number)
                args = {**event["args"], "scenario": scenario.name}
                if shared:
                    args["shared"] = True
                events[pid, tid].append({**event, "pid": pid, "tid": tid, "args": args})
        begin = end + GAP_US
    for key in sorted(events):
        yield from sorted(events[key], key=lambda event: (event["ts"], -event["dur"]))


def _event(row: Row, begin: float, ran: Row | None, file: Path) -> Event:
    phase, start, duration = (row.text("phase"), row.number("start_ms"), row.number("duration_ms"))
    # Whole nanoseconds: with ends rounded alike, no event sticks out of the one around it.
    first = round(begin + 1e3 * (start or 0.0), 3)
    last = round(begin + 1e3 * ((start or 0.0) + (duration or 0.0)), 3)
    if not (math.isfinite(first) and math.isfinite(last)):  # JSON has no such numbers
        raise damaged(file, f"a {phase} begins at {start} ms and takes {duration} ms")
    args: dict[str, Any] = {"step": row.whole("step")}
    name = phase
    if phase == "step":
        name = f"step {row.text('step')}"
        if ran is not None:
            args |= {fact: ran.text(fact) for fact in _STEP_FACTS if ran.text(fact)}
    return {
        "name": name,
        "cat": "step" if phase == "step" else "phase",
        "ph": "X",
        "ts": first,
        "dur": round(max(last - first, 0.0), 3),
        "args": args,
    }
