"""The tool that runs vLLM's unit tests against pcpbench's classes: its parts, without vLLM."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import pytest

from pcpbench.errors import CannotMeasure, UsageError

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

from vllm_unit_tests import __main__ as command  # noqa: E402
from vllm_unit_tests import adapters, aliases, reasons, sources, table  # noqa: E402


def packed(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def test_only_the_tests_of_a_package_that_is_what_was_published_are_unpacked(tmp_path):
    archive = packed(**{"vllm-1.0/tests/v1/test_a.py": "1", "vllm-1.0/vllm/tests.py": "2"})
    digest = hashlib.sha256(archive).hexdigest()
    with pytest.raises(CannotMeasure, match="announces 00ff"):
        sources.unpack_tests(archive, "00ff", tmp_path)
    assert not list(tmp_path.iterdir())
    sources.unpack_tests(archive, digest, tmp_path)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path.relative_to(tmp_path)) for path in found] == ["vllm-1.0/tests/v1/test_a.py"]


def test_the_source_package_is_found_by_name():
    wheel = {"filename": "vllm-1.0-py3-none-any.whl", "url": "w", "hashes": {"sha256": "1"}}
    sdist = {"filename": "vllm-1.0.tar.gz", "url": "s", "hashes": {"sha256": "2"}}
    assert sources.find_sdist({"files": [wheel, sdist]}, "1.0") == ("s", "2")
    with pytest.raises(CannotMeasure, match=r"no vllm-2\.0\.tar\.gz"):
        sources.find_sdist({"files": [wheel, sdist]}, "2.0")


def test_a_cache_that_has_the_tests_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_get", lambda *_: pytest.fail("asked the network"))
    tests = tmp_path / "vllm-1.0" / "tests"
    tests.mkdir(parents=True)
    (tests / "__init__.py").touch()
    assert sources.fetch_tests("1.0", tmp_path) == tmp_path / "vllm-1.0"


def test_an_index_out_of_reach_cannot_be_measured(tmp_path, monkeypatch):
    def unreachable(*_):
        raise OSError("no route")

    monkeypatch.setattr(sources, "_get", unreachable)
    with pytest.raises(CannotMeasure, match=r"no route.*--cache"):
        sources.fetch_tests("1.0", tmp_path)


@pytest.fixture
def package(monkeypatch):
    """theirs.worker has a class and theirs.runner has imported it, under another name too."""
    worker = types.ModuleType("theirs.worker")
    exec("class Tables:\n    def gather(self): return 'theirs'\n", worker.__dict__)
    runner = types.ModuleType("theirs.runner")
    runner.Tables = runner.KnownTables = worker.Tables
    for name, module in (("theirs", types.ModuleType("theirs")), ("theirs.worker", worker),
                         ("theirs.runner", runner)):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    return worker, runner


def test_an_alias_stands_wherever_the_name_was_imported(package):
    worker, runner = package
    ours = type("Tables", (), {})
    aliases.install((aliases.Alias("theirs.worker.Tables", ours),))
    assert worker.Tables is runner.Tables is runner.KnownTables is ours


def test_a_method_is_replaced_in_its_class(package):
    _, runner = package
    aliases.install((aliases.Alias("theirs.worker.Tables.gather", lambda self: "ours"),))
    assert runner.Tables().gather() == "ours"


def test_a_refusal_is_told_in_vllms_words_only_where_it_names_the_same_thing():
    wording = {"mode is FULL": "decode-only"}
    with (
        pytest.raises(ValueError, match="decode-only: mode is FULL"),
        adapters.their_error(ValueError, wording),
    ):
        raise UsageError("mode is FULL")
    with pytest.raises(UsageError, match="use_mla"), adapters.their_error(ValueError, wording):
        raise UsageError("use_mla is false")


TESTS = """
import pytest
from pcpbench.world import World

def test_runs_ours(): assert World(2, 1, 1).size == 2
def test_runs_nothing(): pass
def test_fails():
    World(2, 1, 1)
    assert 1 == 2, "they differ"
@pytest.mark.skip(reason="no device")
def test_skipped(): pass
@pytest.fixture
def broken(): raise OSError("fixture broke")
def test_errs(broken): pass
"""


def test_recorder_tells_how_each_test_ended_and_what_of_pcpbench_it_ran(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_unreadable.py").write_text("import no_such_module")
    outcomes = tmp_path / "outcomes.json"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "vllm_unit_tests.recorder", "--outcomes",
         str(outcomes), "-c", os.devnull, "--rootdir", ".", "--continue-on-collection-errors",
         "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": f"{SCRIPTS.parent}:{SCRIPTS}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
    )  # fmt: skip
    found = json.loads(outcomes.read_text())
    ends = {
        node.split("::")[-1]: (told["outcome"], told["message"]) for node, told in found.items()
    }
    assert ends["test_runs_ours"] == ends["test_runs_nothing"] == ("passed", "")
    assert ends["test_fails"] == ("failed", "AssertionError: they differ")
    assert ends["test_skipped"] == ("skipped", "Skipped: no device")
    assert ends["test_errs"] == ("failed", "OSError: fixture broke")
    assert ends["test_unreadable.py"][0] == "unreadable"
    ran = {node.split("::")[-1]: told["ran"] for node, told in found.items()}
    assert "world:World.size" in ran["test_runs_ours"]
    refusing = {"world:World.__post_init__", "world:World.size", "world:World.legal_dcp_sizes"}
    assert set(ran["test_fails"]) == refusing
    assert not ran["test_runs_nothing"]
    assert not ran["test_skipped"]


def ended(outcome, *ran):
    return {"outcome": outcome, "message": "" if outcome == "passed" else "why", "ran": list(ran)}


LISTED = (
    reasons.Reason("test_a::different*", reasons.DIFFERENCE, "on purpose"),
    reasons.Reason("test_a::internal*", reasons.INTERNALS, "theirs alone"),
    reasons.Reason("test_a::graph[[]True]", reasons.DEVICE, "a graph"),
)


@pytest.mark.parametrize(
    ("name", "vllm", "pcpbench", "row"),
    [
        ("good", "passed", ended("passed", "f"), (True, "", "")),
        ("bad", "passed", ended("failed", "f"), (True, table.FAILURE, "why")),
        ("bad_skip", "passed", ended("skipped", "f"), (True, table.FAILURE, "why")),
        ("bad_alias", "passed", ended("failed"), (True, table.FAILURE, "why")),
        ("missing", "passed", None, (True, table.FAILURE, "the other run did not collect it")),
        ("different[1]", "passed", ended("failed", "f"),
         (True, "different on purpose", "on purpose")),
        ("different", "passed", ended("passed", "f"),
         (True, table.STALE, "passes, and is listed as different: on purpose")),
        ("different", "passed", ended("failed"), (True, table.FAILURE, "why")),
        ("internal_1", "passed", ended("failed", "f"), (False, "no counterpart", "theirs alone")),
        ("internal_2", "passed", ended("passed"), (False, "no counterpart", "theirs alone")),
        ("graph[True]", "failed", ended("failed", "f"), (False, "needs a GPU", "a graph")),
        ("graph[False]", "passed", ended("passed", "f"), (True, "", "")),
        ("elsewhere", "passed", ended("passed"),
         (False, "no counterpart", "runs no code of pcpbench")),
        ("nowhere", "skipped", ended("skipped"), (False, table.NOT_RUN, "why")),
    ],
)  # fmt: skip
def test_what_applies_and_why_the_rest_does_not(monkeypatch, name, vllm, pcpbench, row):
    monkeypatch.setattr(reasons, "REASONS", LISTED)
    node = f"tests/v1/test_a.py::{name}"
    (found,) = table.compare({node: ended(vllm)}, {} if pcpbench is None else {node: pcpbench})
    assert (found.applies, found.kind, found.why) == row
    assert found.test == f"test_a::{name}"
    assert table.is_good([found]) == (row[0] and row[1] in ("", "different on purpose"))


def test_the_table_counts_by_file(monkeypatch):
    monkeypatch.setattr(reasons, "REASONS", LISTED)
    ours = {
        "t/test_a.py::good": ended("passed", "f"),
        "t/test_a.py::different[1]": ended("failed", "f"),
        "t/test_a.py::different[2]": ended("failed", "f"),
        "t/test_b.py::x": ended("passed"),
    }
    rows = table.compare({node: ended("passed") for node in ours}, ours)
    text = table.render(rows)
    assert "| test_a | 3 | 3 | 3 | 1 | 2 |" in text
    assert "| test_b | 1 | 1 | 0 | 0 | 0 |" in text
    assert "| all | 4 | 4 | 3 | 1 | 2 |" in text
    assert "- on purpose: `test_a` different x 2" in text
    assert "- runs no code of pcpbench: `test_b` x" in text
    assert not table.is_good(rows[3:])  # nothing applied: nothing was shown


def test_without_vllm_it_cannot_be_measured(monkeypatch, capsys):
    monkeypatch.setattr(command.host, "installed_version", lambda: None)
    assert command.main([]) == 3
    assert "vllm is not installed here" in capsys.readouterr().err
