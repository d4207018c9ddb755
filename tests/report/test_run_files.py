import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest

from pcpbench.errors import CaptureError, DeviceMissing, UsageError
from pcpbench.report.capture_files import CaptureFiles
from pcpbench.report.compare_files import CompareFiles
from pcpbench.results import PlaceDrift
from pcpbench.timings import Phase, Sample

CONFTEST = Path(__file__).with_name("conftest.py")


@pytest.fixture
def open_compare(make, tmp_path):
    def open_files(**options):
        return CompareFiles(
            tmp_path / "run",
            base="eager",
            candidate="full",
            settings=make.settings,
            environment=make.environment,
            **options,
        )

    return open_files


def manifest(path):
    return json.loads((path / "manifest.json").read_text(), parse_constant=pytest.fail)


def add(files, make, result):
    found = make.steps()
    files.add_scenario(result, found.plan, found.records, found.timings, found.step_drifts)


def test_a_whole_run(make, open_compare):
    result = make.compare(make.passed())
    with open_compare() as files:
        assert manifest(files.path)["outcome"] == "running"
        add(files, make, result.scenarios[0])
        files.finish(result)

    told = manifest(files.path)
    assert told["outcome"] == "pass"
    assert told["exit_code"] == 0
    assert told["schema_version"] == 1
    assert told["command"] == "compare"
    assert told["settings"]["prefill_context_parallel_size"] == 2
    assert told["environment"]["versions"]["torch"] == "2.13.0"
    assert told["notices"][0]["setting"] == "capture_sizes"
    assert told["started_at"] <= told["finished_at"]
    assert sorted(told["files"]) == sorted(p.name for p in files.path.iterdir())


def test_rows_are_there_as_soon_as_a_scenario_ends(make, open_compare):
    with open_compare() as files:
        for number, result in enumerate([make.passed(), make.failed()], start=1):
            add(files, make, result)
            assert len(pd.read_csv(files.path / "summary.csv")) == 4 * number
            assert len(pd.read_csv(files.path / "steps.csv")) == 9 * number
        files.finish(make.compare(make.passed(), make.failed()))

    assert manifest(files.path)["outcome"] == "fail"
    assert manifest(files.path)["exit_code"] == 1


def test_the_device_in_the_rows_is_the_one_that_was_used(make, open_compare, monkeypatch):
    monkeypatch.setitem(make.settings, "device", "auto")
    with open_compare() as files:
        add(files, make, make.passed())

    assert set(pd.read_csv(files.path / "summary.csv").device) == {"cpu"}


@pytest.mark.parametrize(
    ("error", "outcome", "exit_code", "reason"),
    [
        (CaptureError("op x cannot be held"), "fail", 1, "op x cannot be held"),
        (DeviceMissing("no cuda here"), "not compared", 3, "no cuda here"),
        (KeyboardInterrupt(), "interrupted", 130, "KeyboardInterrupt"),
        (SystemExit(143), "interrupted", 143, "SystemExit: 143"),
        (ZeroDivisionError("ours"), "error", None, "ZeroDivisionError: ours"),
    ],
)
def test_a_run_cut_short_says_so(make, open_compare, error, outcome, exit_code, reason):
    with pytest.raises(type(error)), open_compare() as files:  # noqa: PT012
        add(files, make, make.passed())
        raise error

    told = manifest(files.path)
    assert (told["outcome"], told["exit_code"]) == (outcome, exit_code)
    assert reason in told["reasons"][0]
    assert len(pd.read_csv(files.path / "summary.csv")) == 4


def test_a_run_without_a_result_is_never_a_pass(open_compare):
    with open_compare() as files:
        pass

    assert manifest(files.path)["outcome"] == "error"


def test_a_killed_run_leaves_complete_rows(tmp_path):
    code = f"""
        import importlib.util, os, signal
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("made", {str(CONFTEST)!r})
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        from pcpbench.report.compare_files import CompareFiles
        files = CompareFiles(Path({str(tmp_path / "run")!r}), base="eager", candidate="full",
                             settings=made.SETTINGS, environment=made.ENVIRONMENT)
        files.__enter__()
        steps = made.make_steps()
        files.add_scenario(made.make_passed(), steps.plan, steps.records, steps.timings)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)

    assert ended.returncode == -signal.SIGKILL
    assert manifest(tmp_path / "run")["outcome"] == "running"
    assert len(pd.read_csv(tmp_path / "run" / "steps.csv")) == 9
    assert (tmp_path / "run" / "summary.csv").read_text().endswith("\n")


def test_nothing_is_written_where_something_is(make, tmp_path, open_compare):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")

    with pytest.raises(UsageError, match="not empty"):
        open_compare()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("unowned", [False, True])
def test_a_capture(make, tmp_path, unowned):
    result = make.capture(unowned=unowned)
    with CaptureFiles(
        tmp_path / "run", settings=make.settings, environment=make.environment
    ) as files:
        for number, graph in enumerate(result.graphs, start=1):
            files.add_graph(graph)
            assert len(pd.read_csv(files.path / "capture.csv")) == number
        files.finish(result)

    graphs = pd.read_csv(files.path / "capture.csv")
    book = pd.read_csv(files.path / "address_book.csv")
    assert list(graphs.pool_bytes_delta) == [40_960, 0, 40_960, 0]
    assert graphs.num_reqs.isna().tolist() == [True, True, False, False]
    assert len(book) == len(result.addresses)
    assert book.buffer.isna().sum() == unowned
    assert manifest(files.path)["outcome"] == ("fail" if unowned else "pass")


def test_samples_and_phases_are_those_of_scenarios_that_passed(make, open_compare):
    sample = Sample(arm="full", repetition=0, measure="tpot", request="r0", step=None, value_s=2e-3)
    phase = Phase(arm="full", step=3, name="replay", rank=None, start_s=1.0, duration_s=0.5)
    place = PlaceDrift(kind="capture", arm="full", twin="eager_padded[full]", step=3, layer=1,
                       worst=make.steps().step_drifts[0].worst)  # fmt: skip
    found = make.steps()
    with open_compare() as files:
        for result in (make.passed("good"), make.failed()):
            files.add_scenario(result, found.plan, found.records, samples=[sample],
                               place_drifts=[place], phases=[phase])  # fmt: skip
        rows = {name: pd.read_csv(files.path / f"{name}.csv") for name in
                ("samples", "drift", "phases")}  # fmt: skip
    assert list(rows["samples"]["scenario"]) == ["good"]
    assert list(rows["phases"]["scenario"]) == ["good"]
    assert len(rows["drift"]) == 2
    assert rows["samples"]["value_ms"][0] == 2.0
    assert rows["phases"][["start_ms", "duration_ms"]].iloc[0].tolist() == [1000.0, 500.0]
    assert pd.isna(rows["phases"]["rank"][0])
    assert rows["drift"]["layer"].tolist() == [1, 1]
