"""`pcpbench check partition` from options to exit code."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pcpbench import cli
from pcpbench.engine.input_batch import InputBuffers
from pcpbench.errors import CannotMeasure
from pcpbench.session import partition
from pcpbench.targets import builtin_partition
from pcpbench.targets.builtin_partition import BuiltinPartitions


def check(capsys, *arguments):
    code = cli.run(["check", "partition", *arguments])
    return code, *capsys.readouterr()


SMALL = ("--batches", "12", "--pcp", "2", "--dcp", "1")


@pytest.fixture
def spoiled(monkeypatch):
    """An engine that flags no token as padding."""
    original = InputBuffers.pad

    def pad(self, num_reqs, num_rows, num_tokens, num_padded):
        original(self, num_reqs, num_rows, num_tokens, num_padded)
        self.is_padding[num_tokens:num_padded].fill_(False)

    monkeypatch.setattr(InputBuffers, "pad", pad)


def test_a_sample_passes_and_leaves_its_files(tmp_path, capsys):
    out = tmp_path / "run"
    code, text, _ = check(capsys, *SMALL, "--out", str(out))
    assert code == 0
    assert "builtin against the oracle, 12 batches" in text
    assert "0 differ" in text
    assert {"partition.json", "partition.csv", "fields.csv", "parts.jsonl", "manifest.json"} <= {
        file.name for file in out.iterdir()
    }
    document = json.loads((out / "partition.json").read_text())
    assert document["outcome"] == "pass"
    assert document["num_batches"] == 12
    assert document["num_compared"] == sum(
        int(row["num_compared"]) for row in csv.DictReader((out / "partition.csv").open())
    )
    assert json.loads((out / "manifest.json").read_text())["outcome"] == "pass"


def test_a_difference_fails_and_can_be_given_back(tmp_path, capsys, spoiled):
    code, text, _ = check(capsys, *SMALL, "--out", str(tmp_path / "one"))
    assert code == 1
    assert "is_padding" in text
    document = json.loads((tmp_path / "one" / "partition.json").read_text())
    assert document["num_different"] > 0
    batch = document["differences"][0]["case"]
    code, text, _ = check(capsys, "--batch", batch, "--json", "--out", str(tmp_path / "two"))
    assert code == 1
    again = json.loads(text)
    assert again["num_batches"] == 1
    assert again["differences"][0]["case"] == batch


def test_what_earlier_batches_left_is_found_and_said_not_to_show_alone(
    tmp_path, capsys, monkeypatch
):
    original = InputBuffers.pad

    def pad(self, num_reqs, num_rows, num_tokens, num_padded):
        stale = self.seq_lens[num_reqs:].clone()
        original(self, num_reqs, num_rows, num_tokens, num_padded)
        self.seq_lens[num_reqs:] = stale

    monkeypatch.setattr(InputBuffers, "pad", pad)
    out = tmp_path / "run"
    code, text, _ = check(capsys, "--batches", "60", "--pcp", "2", "--out", str(out))
    assert code == 1
    assert "met what an earlier one had left" in " ".join(text.split())
    batch = json.loads((out / "partition.json").read_text())["differences"][0]["case"]
    code, text, _ = check(capsys, "--batch", batch, "--out", str(tmp_path / "alone"))
    assert code == 0
    assert "Alone" not in text


def test_json_is_all_of_stdout(tmp_path, capsys):
    code, text, talk = check(capsys, *SMALL, "--json", "--out", str(tmp_path / "run"))
    assert code == 0
    assert json.loads(text)["makers"] == ["oracle", "builtin"]
    assert "PASS" in talk


def test_a_run_that_is_cut_short_is_no_pass_and_goes_on(tmp_path, capsys):
    out = tmp_path / "run"
    some = ("--exhaustive", "--pcp", "2", "--dcp", "1", "--max-requests", "1")
    code, text, _ = check(capsys, *some, "--max-time", "0.000001", "--out", str(out))
    assert code == 3
    assert "--max-time was over" in text
    code, text, _ = check(capsys, *some, "--resume", str(out))
    assert code == 0
    done = (out / "parts.jsonl").read_text().splitlines()
    code, _, _ = check(capsys, *some, "--resume", str(out))
    assert code == 0
    assert (out / "parts.jsonl").read_text().splitlines() == done


def test_lines_that_do_not_count_leave_nothing_unrun(tmp_path, capsys):
    out = tmp_path / "run"
    some = ("--exhaustive", "--pcp", "1", "--tp", "1", "--max-requests", "1")
    assert check(capsys, *some, "--out", str(out))[0] == 0
    first, second = (out / "parts.jsonl").read_text().splitlines(keepends=True)
    for damage in (
        first + first,
        first + second.replace('"name":"', '"name":"another '),
        first + '{"name":"' + json.loads(second)["name"] + '"}\n',
        first + second[:-40],
        "\0\n" + first,
    ):
        (out / "parts.jsonl").write_text(damage)
        code, text, _ = check(capsys, *some, "--resume", str(out), "--max-time", "0.000001")
        assert code == 3
        assert "1 of 2 parts" in text
        assert check(capsys, *some, "--resume", str(out))[0] == 0
        names = [json.loads(line)["name"] for line in (out / "parts.jsonl").open()]
        assert names == [json.loads(line)["name"] for line in (first, second)]


def test_an_interrupted_run_leaves_what_is_done(tmp_path, capsys, monkeypatch):
    from pcpbench.session.partition_parts import PartRunner

    original, seen = PartRunner.run, []

    def run(self, part):
        if seen:
            raise KeyboardInterrupt
        seen.append(part)
        return original(self, part)

    monkeypatch.setattr(PartRunner, "run", run)
    out = tmp_path / "run"
    code, _, _ = check(capsys, "--batches", "30", "--pcp", "2", "--out", str(out))
    assert code == 130
    assert len((out / "parts.jsonl").read_text().splitlines()) == 1
    document = json.loads((out / "partition.json").read_text())
    assert document["num_parts_done"] == 1
    assert document["outcome"] == "not compared"


def test_jobs_come_to_the_same(tmp_path, capsys):
    found = []
    for jobs in ("1", "2"):
        out = tmp_path / jobs
        code, _, _ = check(
            capsys, "--batches", "20", "--pcp", "2", "--jobs", jobs, "--out", str(out)
        )
        assert code == 0
        document = json.loads((out / "partition.json").read_text())
        found.append(sorted(map(str, document["groups"])))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--target gpu", "--target is 'gpu'"),
        ("--batches 0", "--batches is 0"),
        ("--seed -1", "--seed is -1"),
        ("--max-requests 5", "--max-requests is 5"),
        ("--jobs 0", "--jobs is 0"),
        ("--max-time 0", "--max-time is 0"),
        ("--pcp 3", "--pcp is 3"),
        ("--dcp 8 --pcp 2", "no batch of the enumeration"),
        ("--interleave 2 --dcp 1", "no batch of the enumeration"),
        ("--batch nonsense", "--batch is 'nonsense'"),
        ("--resume x", "add --exhaustive"),
        ("--exhaustive --resume x --out y", "leave --out out"),
    ],
)
def test_bad_options_are_refused_by_name(capsys, arguments, told):
    code, _, talk = check(capsys, *arguments.split())
    assert code == 2
    assert told in talk


def test_a_run_cannot_go_on_with_other_options(tmp_path, capsys):
    out = tmp_path / "run"
    some = ("--exhaustive", "--pcp", "2", "--dcp", "1", "--max-requests", "1")
    check(capsys, *some, "--max-time", "0.000001", "--out", str(out))
    code, _, talk = check(
        capsys, "--exhaustive", "--pcp", "1", "--max-requests", "1", "--resume", str(out)
    )
    assert code == 2
    assert "was made with pcp [2]" in talk


def test_a_run_cannot_go_on_with_another_version_of_its_target(tmp_path, capsys, monkeypatch):
    """Nor with parts of which nobody wrote down what version made them."""

    class Upgraded(BuiltinPartitions):
        name = "vllm"

    monkeypatch.setattr(
        partition, "makers_of", lambda target, exhaustive: [BuiltinPartitions(), Upgraded()]
    )
    out = tmp_path / "run"
    some = ("--exhaustive", "--target", "vllm", "--pcp", "1", "--tp", "1", "--max-requests", "1")
    found = []
    for version in ("0.31.0", "0.32.0", "0.31.0"):
        monkeypatch.setattr(Upgraded, "version", version)
        where = ("--resume", str(out)) if found else ("--out", str(out))
        code, _, talk = check(capsys, *some, *where)
        found.append(code)
        if version == "0.32.0":
            assert "was made with target_version 0.31.0, now 0.32.0" in talk
    assert found == [0, 2, 0]
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["settings"]["target_version"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert check(capsys, *some, "--resume", str(out))[0] == 2


def test_a_difference_that_was_seen_outweighs_what_ended_the_run(tmp_path, monkeypatch):
    """Whatever kept the other pieces from being looked at."""
    done = []

    def run(self, part):
        if done:
            raise CannotMeasure("there is not enough memory.")
        done.append(part)
        return real(self, part)

    real = partition.PartRunner.run
    monkeypatch.setattr(partition.PartRunner, "run", run)
    some = ("--exhaustive", "--pcp", "1", "--tp", "1", "--max-requests", "1")
    assert cli.run(["check", "partition", *some, "--out", str(tmp_path / "sound")]) == 3
    done.clear()
    monkeypatch.setattr(builtin_partition, "token_at", lambda *arguments: 1)
    assert cli.run(["check", "partition", *some, "--out", str(tmp_path / "wrong")]) == 1
    document = json.loads((tmp_path / "wrong" / "partition.json").read_text())
    assert document["outcome"] == "fail"


def test_processes_end_with_the_first_one(tmp_path):
    some = ("--exhaustive", "--pcp", "2", "--jobs", "2", "--out", str(tmp_path / "run"))
    command = [sys.executable, "-m", "pcpbench", "check", "partition", *some]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as first:
        deadline = time.monotonic() + 60
        while len(children_of(first.pid)) < 3:  # two, and what tracks their resources
            assert time.monotonic() < deadline
            time.sleep(0.1)
        children = children_of(first.pid)
        first.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
