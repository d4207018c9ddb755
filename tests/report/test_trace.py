"""The trace of a comparison on disk, from hand-made tables."""

import json
from pathlib import Path

import pytest

from pcpbench.errors import UsageError
from pcpbench.report.stored import Row, StoredRun
from pcpbench.report.trace import render_trace


def run_with(start_ms, duration_ms):
    phase = {"arm": "full", "step": "0", "rank": "", "phase": "step"}
    tables = {
        "summary.csv": [{"arm": "full", "role": "candidate", "outcome": "pass"}],
        "phases.csv": [{**phase, "start_ms": start_ms, "duration_ms": duration_ms}],
    }
    rows = {
        name: [Row({"scenario": "s", **cells}, name) for cells in found]
        for name, found in tables.items()
    }
    return StoredRun(Path("run"), {"command": "compare"}, rows)


def test_times_are_in_microseconds():
    trace = json.loads(render_trace(run_with("0.5", "2")))
    (event,) = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert (event["ts"], event["dur"]) == (500.0, 2000.0)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e308"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_time_that_is_not_finite_is_damage(value, place):
    times = ["0.5", "2"]
    times[place] = value
    with pytest.raises(UsageError, match=r"'run/phases\.csv' is damaged: a step begins at"):
        render_trace(run_with(*times))
