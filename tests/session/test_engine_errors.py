"""What an engine raises is a result with a place (C0), and no failure of pcpbench."""

import errno
from unittest.mock import Mock

import pytest
import torch

from pcpbench import cli
from pcpbench.device.accelerator import AcceleratorGraphBackend
from pcpbench.engine.block_table import BlockTables
from pcpbench.engine.engine import Engine
from pcpbench.errors import CannotMeasure, EngineError, NoMemory, UsageError
from pcpbench.pcp_manager import PCPManager
from pcpbench.results import Outcome
from pcpbench.targets import builtin
from pcpbench.targets.engine_errors import engine_errors


def off_by_one(self, *arguments, **settings):
    return [1, 2][2]


def test_a_step_that_raises_fails_and_names_arm_step_and_place(bench, monkeypatch):
    trial = bench("s2-capture-edges")
    execute = Engine.execute

    def faulty(self, step, *fed):
        if step.index == 3 and self is trial.engine("full"):
            off_by_one(self)
        return execute(self, step, *fed)

    monkeypatch.setattr(Engine, "execute", faulty)
    result = trial.run()
    assert result.outcome is Outcome.FAIL
    (found,) = result.violations
    assert (found.contract, found.arm, found.step) == ("C0", "full", 3)
    assert "the engine raised IndexError: list index out of range" in found.message
    assert "session/test_engine_errors.py" in found.message
    assert "in off_by_one" in found.message


def test_a_record_that_cannot_be_taken_is_the_engines_doing(bench, monkeypatch):
    trial = bench("s2-capture-edges")
    monkeypatch.setattr("pcpbench.targets.builtin.record_step", off_by_one)
    (found,) = trial.run().violations
    assert (found.contract, found.step) == ("C0", 0)
    assert "IndexError" in found.message


def test_a_capture_that_raises_is_exit_1_without_a_traceback(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PCPManager, "prepare_inputs_to_capture", off_by_one)
    arguments = "compare eager full --scenario s2-capture-edges --repetitions 0"
    assert cli.run(arguments.split()) == 1
    captured = capsys.readouterr()
    assert "the engine raised IndexError" in " ".join(captured.out.split())
    assert "Traceback" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyError("r0"), EngineError),
        (AssertionError(), EngineError),
        (NotImplementedError("no kernel"), EngineError),
        (MemoryError(), CannotMeasure),
        (torch.OutOfMemoryError("tried to allocate 2 GiB."), CannotMeasure),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 9 bytes. Error code 12 (Cannot allocate memory)"
            ),
            CannotMeasure,
        ),
        (RuntimeError("std::bad_alloc"), CannotMeasure),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), CannotMeasure),
        (RuntimeError("the size of tensor a must match"), EngineError),
        (UsageError("asked for the impossible"), UsageError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_an_engine_that_broke_is_told_from_a_machine_that_cannot(error, raised):
    with pytest.raises(raised) as caught, engine_errors():
        raise error
    assert "\n" not in str(caught.value)


def test_memory_that_is_not_there_is_no_fault_of_a_build_or_a_capture(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    full = Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    for owner, name in ((builtin, "Engine"), (PCPManager, "prepare_inputs_to_capture")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            for command in ("compare eager full --repetitions 0", "capture", "faults run --fault "
                            "stale-block-rows"):  # fmt: skip
                assert cli.run(command.split()) == 3, command
                told = capsys.readouterr()
                assert "there is not enough memory" in " ".join((told.out + told.err).split())
                assert "Traceback" not in told.err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_device_that_is_full_has_refused_no_capture():
    backend = AcceleratorGraphBackend()
    with pytest.raises(NoMemory):
        backend.capture(Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")),
                        backend.new_pool())  # fmt: skip


def test_a_fallback_that_fails_after_memory_ran_out_is_the_engines():
    """It caught that it had none, and what it did then is its own mistake."""
    with pytest.raises(EngineError, match="ValueError: bug"), engine_errors():
        fall_back_and_fail()


def fall_back_and_fail():
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    except torch.OutOfMemoryError:
        raise ValueError("bug")  # noqa: B904


def test_the_place_is_not_inside_torch():
    with pytest.raises(EngineError, match=r"session/test_engine_errors.py:\d+"), engine_errors():
        torch.zeros(2).view(3)


def test_what_was_seen_before_memory_ran_out_stands(bench, monkeypatch):
    """A contract broke in an earlier step of the scenario: it has failed, whatever comes."""
    execute, trial = Engine.execute, bench("s2-capture-edges")
    monkeypatch.setattr(BlockTables, "gather_block_tables", stale(BlockTables.gather_block_tables))

    def full(self, plan, *arguments, **named):
        if plan.index == 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return execute(self, plan, *arguments, **named)

    monkeypatch.setattr(Engine, "execute", full)
    result = trial.run()
    assert result.outcome is Outcome.FAIL
    assert "not enough memory" in " ".join(notice.message for notice in result.notices)


def test_memory_that_runs_out_in_a_sound_scenario_is_no_verdict(bench, monkeypatch):
    monkeypatch.setattr(Engine, "execute", Mock(side_effect=RuntimeError("std::bad_alloc")))
    trial = bench("s2-capture-edges")
    with pytest.raises(NoMemory):
        trial.run()


def stale(gather):
    def faulty(self, *arguments, **named):
        tables = gather(self, *arguments, **named)
        for table in tables:
            table[:1] += 1
        return tables

    return faulty
