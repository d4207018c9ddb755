"""Baselines on disk: what was written is read, and what is not ours changes nothing."""

import hashlib
import json
import os
import platform
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from pcpbench.engine_options import EngineOptions
from pcpbench.errors import UsageError
from pcpbench.gate_jobs import SampleJob
from pcpbench.gate_lines import process_bytes
from pcpbench.gate_samples import ProcessFailure
from pcpbench.session.baseline import (
    baseline_bytes,
    check_writable,
    read_measured,
    samples_bytes,
    write_baseline,
)
from pcpbench.session.here import measured_here

JOB = SampleJob(base="eager", candidate="full", options=EngineOptions())
RATIOS = [0.8, 0.81, 0.79, 0.8, 0.82]


@pytest.fixture
def stored(tmp_path, fake):
    path = tmp_path / "main.json"
    write_baseline(path, fake.measured(RATIOS))
    return path


def test_what_was_written_is_read(stored, fake):
    assert read_measured(stored) == fake.measured(RATIOS)
    assert [p.name for p in stored.parent.iterdir()] == ["main.json"]


def test_a_baseline_holds_no_name_of_the_machine(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "a-name-of-mine")
    here = measured_here(JOB, (fake.judged(),))
    write_baseline(tmp_path / "b.json", replace(here, processes=fake.processes(RATIOS)))
    text = (tmp_path / "b.json").read_text(encoding="utf-8")
    assert here.machine.id in text
    assert "a-name-of-mine" not in text
    machine_id = Path("/etc/machine-id")
    assert not machine_id.exists() or machine_id.read_text().strip() not in text
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert measured_here(JOB).machine.id != here.machine.id


@pytest.mark.parametrize("why", ["failed", "wrong tokens", "slowed", "nothing was judged"])
def test_what_was_no_baseline_does_not_become_one_through_its_directory(tmp_path, fake, why):
    run = fake.measured(RATIOS)
    if why == "failed":
        run = replace(run, judged=(fake.judged(outcome="fail", drifts=1),))
    elif why == "wrong tokens":
        run = replace(run, processes=fake.processes(RATIOS, num_wrong=3))
    elif why == "slowed":
        run = replace(run, job=replace(run.job, slowdown=0.05))
    else:
        run = replace(run, judged=())
    (tmp_path / "samples.jsonl").write_bytes(samples_bytes(run))
    assert read_measured(tmp_path, "run") == run
    with pytest.raises(UsageError, match=why):
        read_measured(tmp_path, "baseline")


def test_a_path_that_cannot_be_looked_at_is_bad_input(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / ("x" * 300), tmp_path / "loop"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_measured(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no regular file"):
        read_measured(tmp_path / "pipe")


def test_samples_of_a_killed_run_are_read_up_to_the_last_whole_line(tmp_path, fake):
    run = fake.measured([])
    lines = [baseline_bytes(run), *map(process_bytes, fake.processes(RATIOS))]
    (tmp_path / "samples.jsonl").write_bytes(b"".join(lines)[:-20])
    read = read_measured(tmp_path, "run")
    assert read == fake.measured(RATIOS[:-1])
    (tmp_path / "samples.jsonl").write_bytes(b"".join(lines[:4]))
    assert len(read_measured(tmp_path, "run").processes) == 3
    with pytest.raises(UsageError, match="holds 3 measured processes, and 4 is the least"):
        read_measured(tmp_path, "baseline")


def test_a_line_with_another_digit_is_damaged(tmp_path, fake):
    data = samples_bytes(fake.measured(RATIOS))
    (tmp_path / "samples.jsonl").write_bytes(data.replace(b'"wall_s":', b'"wall_s":1', 1))
    with pytest.raises(UsageError, match=r"is damaged in line 2 \(its checksum is not that"):
        read_measured(tmp_path, "run")


def test_processes_that_broke_are_read_again_and_make_no_baseline(tmp_path, fake):
    broken = ProcessFailure(why="C8 broke", is_crash=False)
    run = fake.measured(RATIOS).with_failure(broken)
    (tmp_path / "samples.jsonl").write_bytes(samples_bytes(run))
    assert read_measured(tmp_path, "run").failures == (broken,)
    with pytest.raises(UsageError, match=r"a process that ended without a sample \(C8 broke\)"):
        read_measured(tmp_path, "baseline")


def test_a_field_that_came_later_does_not_make_an_older_file_a_damaged_one(stored, fake):
    document = json.loads(stored.read_text(encoding="utf-8"))
    del document["measured"]["job"]["floor_repetitions"]  # one that has a default
    document["checksum"] = hashlib.sha256(
        msgspec.json.encode(document["measured"], order="sorted")
    ).hexdigest()
    stored.write_text(json.dumps(document, indent=2), encoding="utf-8")
    assert read_measured(stored) == fake.measured(RATIOS)


def damaged(text):
    data = json.loads(text)
    yield "cut short", text[: len(text) // 2]
    yield "cut short", text[:-3]
    yield "empty", ""
    yield "empty", "\n"
    yield "cut short", "hello"
    yield "cut short", "[" * 200_000
    yield "no file of pcpbench", "[1, 2]"
    yield "no file of pcpbench", '{"schema_version": 1}'
    yield "no file of pcpbench", json.dumps({**data, "format": "pytest-benchmark"})
    yield "newer", json.dumps({**data, "schema_version": 2, "pcpbench_version": "9.1"})
    yield "schema version", json.dumps({**data, "schema_version": 0})
    yield "schema version", json.dumps({**data, "schema_version": "1"})
    yield "damaged", json.dumps({**data, "surprise": 1})
    yield "damaged", json.dumps({**data, "measured": {**data["measured"], "processes": 3}})
    yield "checksum", text.replace('"ratio": 0.81', '"ratio": 0.71')
    yield "checksum", text.replace('"torch": "2.13.0"', '"torch": "2.13.1"')
    yield "damaged", text.replace('"ratio": 0.81', '"ratio": NaN')


def test_every_kind_of_damage_is_told_and_nothing_is_changed(stored):
    sound = stored.read_text(encoding="utf-8")
    kinds = list(damaged(sound))
    assert all(text != sound for _, text in kinds)
    for told, text in kinds:
        stored.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError) as refusal:
            read_measured(stored)
        assert told in str(refusal.value), (told, str(refusal.value))
        assert "main.json" in str(refusal.value)
        assert stored.read_text(encoding="utf-8") == text
        assert [p.name for p in stored.parent.iterdir()] == ["main.json"]


def test_every_cut_of_a_baseline_is_refused(stored):
    whole = stored.read_bytes()
    for size in range(0, len(whole) - 1, 997):
        stored.write_bytes(whole[:size])
        with pytest.raises(UsageError):
            read_measured(stored)


def test_bytes_that_are_no_text_and_places_that_are_no_file(tmp_path):
    (tmp_path / "b").write_bytes(bytes(range(256)))
    for path, told in [
        (tmp_path / "b", "damaged"),
        (tmp_path / "none.json", "does not exist"),
        (tmp_path, "holds no samples.jsonl"),
    ]:
        with pytest.raises(UsageError, match=told):
            read_measured(path)


def test_processes_that_did_not_time_the_same_are_damage(tmp_path, fake):
    other = fake.process(fake.scenario("t"))
    run = fake.measured([], processes=(*fake.processes(RATIOS), other))
    write_baseline(tmp_path / "b.json", run)
    with pytest.raises(UsageError, match="did not time the same"):
        read_measured(tmp_path / "b.json")


def test_a_process_twice_is_damage(tmp_path, fake):
    run = fake.measured(RATIOS)
    lines = samples_bytes(run) + process_bytes(run.processes[-1])
    (tmp_path / "samples.jsonl").write_bytes(lines)
    with pytest.raises(UsageError, match="holds a process twice"):
        read_measured(tmp_path, "run")


def test_a_baseline_is_written_over_a_baseline_and_over_nothing_else(tmp_path, stored):
    check_writable(stored)
    check_writable(tmp_path / "new.json")
    (tmp_path / "notes.json").write_text('{"mine": 1}', encoding="utf-8")
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    for path in (tmp_path / "notes.json", tmp_path / "notes.txt", tmp_path):
        with pytest.raises(UsageError, match="--save-baseline"):
            check_writable(path)
    with pytest.raises(UsageError, match="directory that is there"):
        check_writable(tmp_path / "nowhere" / "b.json")
    (tmp_path / "empty.json").touch()  # as `mktemp` leaves one
    check_writable(tmp_path / "empty.json")


def test_what_cannot_be_replaced_is_called_what_it_is(tmp_path, stored):
    text = stored.read_text(encoding="utf-8")
    (tmp_path / "cut.json").write_text(text[: len(text) // 2], encoding="utf-8")
    newer = text.replace('"schema_version": 1', '"schema_version": 2')
    (tmp_path / "newer.json").write_text(newer, encoding="utf-8")
    for name, told in (("cut", "damaged or cut short: delete it"), ("newer", "newer pcpbench")):
        with pytest.raises(UsageError, match=told):
            check_writable(tmp_path / f"{name}.json")


def test_a_name_that_would_be_read_as_lines_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"read as the samples of a run: name it main\.json"):
        check_writable(tmp_path / "main.jsonl")
