"""The report of whole engines on a console."""

import io

import pytest
from rich.console import Console

from pcpbench.engine_results import ArmResult, EngineResult, StepCounts
from pcpbench.records import Environment
from pcpbench.report.engine_view import print_engine
from pcpbench.results import Outcome


@pytest.fixture
def shown():
    """Called with the modes of the candidate's steps, what is printed, on one line."""

    def show(modes):
        reference = ArmResult(
            arm="reference", twin=None, kind=None, num_ranks=1, pcp_size=1, cudagraph_mode="NONE",
            num_requests=2, num_tokens=9, counts=StepCounts(rank=0, steps=9), init_s=1.0,
        )  # fmt: skip
        full = ArmResult(
            arm="full", twin="reference", kind="padding", num_ranks=2, pcp_size=2, num_requests=2,
            cudagraph_mode="FULL_AND_PIECEWISE", num_tokens=9, num_rows=9, num_equal=9,
            counts=StepCounts(rank=0, steps=sum(modes.values()), modes=modes), init_s=1.0,
            max_dlogprob=0.2, limit=1.2, median_dlogprob=0.1, median_limit=0.375,
        )  # fmt: skip
        settings = {
            "model": "random", "dtype": "float32", "prefill_context_parallel_size": 2,
            "decode_context_parallel_size": 1, "tensor_parallel_size": 1,
        }  # fmt: skip
        environment = Environment(
            versions={}, device="cuda", device_name="GPU", num_threads=1, platform="Linux"
        )
        result = EngineResult(
            base="reference", candidate="full", outcome=Outcome.PASS, reasons=(),
            arms=(reference, full), settings=settings, environment=environment,
        )  # fmt: skip
        out = io.StringIO()
        print_engine(result, Console(file=out, width=200))
        return " ".join(out.getvalue().split())

    return show


def test_the_share_of_steps_that_replayed_a_graph_is_told(shown):
    told = shown({"FULL": 1, "NONE": 31, "PIECEWISE": 8})
    assert "full: 40 steps (1 FULL, 31 NONE, 8 PIECEWISE); 2.5 % as FULL and 20.0 % as PIEC" in told
    assert " as NONE" not in shown({"NONE": 9})


def test_the_middle_row_is_told_with_its_limit(shown):
    assert "9 of 9 rows of log-probabilities; 0.1 in the middle row (at most 0.375)" in shown({})
