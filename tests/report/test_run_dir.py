import errno
import os
import re
import threading

import pytest

from pcpbench.errors import CannotMeasure, UsageError
from pcpbench.report.run_dir import RunDir


def test_a_run_without_out_gets_a_name_of_its_own(tmp_path):
    first = RunDir.create("compare", root=tmp_path / "results")
    second = RunDir.create("compare", root=tmp_path / "results")

    assert first.path != second.path
    assert first.path.is_dir()
    assert re.fullmatch(r"\d{8}T\d{6}Z-compare-[0-9a-f]{4}", first.path.name)


def test_a_name_that_is_taken_is_never_used_again(tmp_path, monkeypatch):
    suffixes = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(suffixes))
    first = RunDir.create("compare", root=tmp_path)
    # Whatever the clock does between the two: the second run must not land in the first's.
    second = RunDir.create("compare", root=tmp_path)

    assert first.path != second.path


def test_out_may_be_new_or_empty(tmp_path):
    (tmp_path / "empty").mkdir()

    assert RunDir.create("compare", tmp_path / "empty").path == tmp_path / "empty"
    assert RunDir.create("compare", tmp_path / "a" / "b").path.is_dir()


def test_out_that_holds_anything_is_refused_and_left_alone(tmp_path):
    (tmp_path / "summary.csv").write_text("earlier")

    with pytest.raises(UsageError, match=r"--out is .* not empty.*new or empty"):
        RunDir.create("compare", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["summary.csv"]
    assert (tmp_path / "summary.csv").read_text() == "earlier"


def test_of_two_runs_at_once_one_has_the_directory(tmp_path):
    """Threads that all see it empty: the create of one file decides."""
    for number in range(20):
        out, gate, won, refused = tmp_path / str(number), threading.Barrier(4), [], []

        def take(out=out, gate=gate, won=won, refused=refused):
            gate.wait()
            try:
                won.append(RunDir.create("compare", out))
            except UsageError as error:
                refused.append(str(error))

        takers = [threading.Thread(target=take) for _ in range(4)]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join()
        assert (len(won), len(refused)) == (1, 3)
        assert all("not empty" in told for told in refused)


def test_a_directory_that_another_run_takes_meanwhile_is_refused(tmp_path, monkeypatch):
    """Between the look and the claim."""
    out, make = tmp_path / "run", os.open

    def later(path, *rest):
        (out / "manifest.json").write_text("theirs")
        return make(path, *rest)

    monkeypatch.setattr(os, "open", later)
    with pytest.raises(UsageError, match="not empty"):
        RunDir.create("compare", out)
    assert (out / "manifest.json").read_text() == "theirs"


def test_a_file_that_turns_up_meanwhile_is_left_alone(tmp_path, monkeypatch):
    out, make = tmp_path / "run", os.open

    def later(path, *rest):
        (out / "notes.txt").write_text("theirs")
        return make(path, *rest)

    monkeypatch.setattr(os, "open", later)
    with pytest.raises(UsageError, match="not empty"):
        RunDir.create("compare", out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "taken").write_text("x")

    with pytest.raises(UsageError, match=r"--out is .*which is a file"):
        RunDir.create("compare", tmp_path / "taken")
    with pytest.raises(UsageError, match="cannot be written"):
        RunDir.create("compare", tmp_path / "taken" / "below")


def test_a_whole_file_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    run_dir = RunDir.create("compare", tmp_path / "run")
    run_dir.write_text("manifest.json", "old\n")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run_dir.write_text("manifest.json", "new\n")

    assert [p.name for p in run_dir.path.iterdir()] == ["manifest.json"]
    assert (run_dir.path / "manifest.json").read_text() == "old\n"
    monkeypatch.undo()
    run_dir.write_text("manifest.json", "new\n")
    assert (run_dir.path / "manifest.json").read_text() == "new\n"
    assert run_dir.files == ["manifest.json"]


def test_rows_grow_a_file(tmp_path):
    run_dir = RunDir.create("compare", tmp_path / "run")
    run_dir.append_text("steps.csv", "a,b\n")
    run_dir.append_text("steps.csv", "1,2\n")

    assert (run_dir.path / "steps.csv").read_text() == "a,b\n1,2\n"
    with pytest.raises(ValueError, match="newline"):
        run_dir.append_text("steps.csv", "3,4")


def test_rows_that_did_not_fit_are_taken_back(tmp_path, monkeypatch):
    run_dir = RunDir.create("compare", tmp_path / "run")
    run_dir.append_text("steps.csv", "a,b\n1,2\n")
    write, calls = os.write, []

    def half(fd, data):
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, bytes(data)[:3])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(CannotMeasure, match=r"steps\.csv.*No space left.*--out"):
        run_dir.append_text("steps.csv", "3,4\n5,6\n")

    assert len(calls) == 2
    assert (run_dir.path / "steps.csv").read_text() == "a,b\n1,2\n"


def test_rows_are_on_disk_when_the_call_returns(tmp_path, monkeypatch):
    run_dir = RunDir.create("compare", tmp_path / "run")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))

    run_dir.append_text("steps.csv", "a,b\n")

    assert synced == [4]
