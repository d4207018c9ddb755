"""Tables of `modes` and `matrix` at 80 and 140 columns, from hand-made results."""

import io

import pytest
from msgspec.structs import replace

from pcpbench.matrix_cells import Cell, Parallel
from pcpbench.matrix_results import CellOutcome, CellRecord, FaultCount, MatrixResult
from pcpbench.modes_results import ModeRow, ModesResult, Served, Speed, TokenTrace
from pcpbench.records import Environment
from pcpbench.report.console import make_console
from pcpbench.report.matrix_view import print_matrix
from pcpbench.report.modes_view import print_modes
from pcpbench.results import Outcome, Ratio, Stat

WIDTHS = (80, 140)
STAT = Stat(mean=2e-3, median=2e-3, std=0.0, p99=2e-3, num_samples=9)
RATIO = Ratio(median=0.9, low=0.85, high=0.95, num_pairs=9)
SPEED = Speed(tpot=STAT, ttft=STAT, step=STAT, launch=STAT, tokens_per_s=(400.0, 600.0))
TIMED = replace(SPEED, tpot_ratio=RATIO, ttft_ratio=RATIO, launch_ratio=RATIO,
                throughput_ratio=replace(RATIO, low=0.5, high=1.5))  # fmt: skip
TRACE = TokenTrace(mode="FULL_AND_PIECEWISE", request="p12", token_index=5, step=33, none_token=7,
                   mode_token=9, gap=1e-6, drift=4e-6, own_drift=4e-6, limit=3e-4)  # fmt: skip
CELL = Cell(parallel=Parallel(pcp=2, tp=2, dcp=4), spec_tokens=3, microbatch=True, model="moe")


def row(mode, **changes):
    counts = {"num_tokens": 2000, "num_equal": 2000, "num_requests": 200, "num_requests_equal": 200}
    served = {"steps": Served(full=3, piecewise=1), "tokens": Served(full=1, piecewise=3)}
    return ModeRow(**{"mode": mode, "arm": "full", **counts, **served, **changes})


def modes_result(**changes):
    rows = (
        row("NONE", steps=Served(none=4), tokens=Served(none=4), speed=SPEED),
        row("FULL_AND_PIECEWISE", num_equal=1990, first=TRACE, num_traced=1, speed=TIMED),
    )
    settings = {"feed": "free-running", "dtype": "float32"}
    known = {"outcome": Outcome.PASS, "reasons": (), "rows": rows, "traces": (TRACE,)}
    about = {"num_steps": 4, "settings": settings, "environment": Environment(), "run_dir": "r"}
    return ModesResult(**{**known, **about, **changes})


def printed(show, result, width):
    stream = io.StringIO()
    show(result, make_console(stream, width))
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return " ".join(stream.getvalue().split())


@pytest.mark.parametrize("width", WIDTHS)
def test_a_mode_has_a_row_and_its_flip_is_told(width):
    text = printed(print_modes, modes_result(), width)
    assert "1 differing token, each explained by padding drift." in text
    assert "99.5 %" in text
    assert "9 for 7; gap in NONE 1.0e-06, padding drift 4.0e-06 (at most 3.0e-04)" in text
    assert "75 %" in text.replace("75.0", "75")
    assert ("0.90 [0.85, 0.95]" in text) == (width == 140)
    assert ("~0.90" in text) == (width == 80)  # the interval of the throughput holds 1


@pytest.mark.parametrize("width", WIDTHS)
def test_a_failed_run_shows_no_times_and_says_why(width):
    unexplained = replace(TRACE, why="there is no drift")
    failed = modes_result(
        outcome=Outcome.FAIL,
        reasons=("1 of 1 differing tokens not explained",),
        rows=tuple(replace(each, speed=None) for each in modes_result().rows),
        traces=(unexplained,),
    )
    text = printed(print_modes, failed, width)
    assert text.startswith("FAIL")
    assert "NOT explained FULL_AND_PIECEWISE, p12 token 5, step 33: 9 for 7" in text
    assert "there is no drift" in text
    assert "TPOT" not in text
    assert "no times: the tokens were not judged sound" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_every_cell_has_its_row_and_every_reason_its_line(width):
    passed = CellRecord(cell=CELL, outcome=CellOutcome.PASS, num_scenarios=16, num_passed=16,
                        num_steps=859, capture_is_zero=True, wall_s=61.0,
                        faults=FaultCount(num_faults=17, num_caught=17))  # fmt: skip
    failed = replace(passed, cell=replace(CELL, spec_tokens=1), outcome=CellOutcome.FAIL,
                     reason="s: C5", violated=("C5",), capture_is_zero=False)  # fmt: skip
    lost = CellRecord(cell=replace(CELL, spec_tokens=0), outcome=CellOutcome.CRASHED,
                      reason="its process was ended by SIGKILL")  # fmt: skip
    result = MatrixResult(
        cells=(passed, failed, lost),
        settings={"faults": True, "checks": "quick", "dtype": "float32", "scenarios": {"s": "x"}},
        environment=Environment(),
        run_dir="r",
    )
    text = printed(print_matrix, result, width)
    assert "FAIL 3 cells: 1 pass, 1 fail, 1 crashed" in text
    assert "16/16" in text
    assert "17/17" in text
    assert ("NOT zero" in text) == (width == 140)  # else two lines, with other cells between
    assert "Fail 1 cell (pcp2-tp2-dcp4_k1_ub_moe): s: C5" in text
    assert "SIGKILL" in text
    assert ("tiny-sparse-moe" in text) == (width == 140)
