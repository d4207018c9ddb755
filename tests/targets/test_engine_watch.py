"""What is counted in vLLM's workers, and what the faults change there; with real tensors."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pcpbench.targets.engine.host import CHILD

spec = importlib.util.spec_from_file_location("engine_watch", CHILD / "engine_watch.py")
watch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(watch)

RESTORE = [0, 1, 4, 5, 6, 7, 2]
"""Two ranks padded to four tokens: `A B G _ | C D E F`."""


class Manager:
    pcp_world_size = 2

    def __init__(self, restore=RESTORE):
        self.restore = restore

    def partition_batch(self, batch, desc):
        self._hidden_restore_idx = torch.tensor(self.restore)
        self._gathered_kv_write_mask = torch.zeros(8, dtype=torch.bool)
        self._gathered_kv_write_mask[self._hidden_restore_idx] = True
        return SimpleNamespace(num_tokens_after_padding=4)


class Worker(watch.EngineWatch):
    def __init__(self, manager):
        dispatch = SimpleNamespace(
            dispatch=lambda *args: SimpleNamespace(cg_mode=SimpleNamespace(name="FULL")),
            cudagraph_mode=SimpleNamespace(name="PIECEWISE"),
        )
        self.model_runner = SimpleNamespace(
            execute_model=self.step, cudagraph_manager=dispatch, pcp_manager=manager
        )
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
            parallel_config=SimpleNamespace(decode_context_parallel_size=2),
        )

    def step(self, output, **settings):
        self.model_runner.cudagraph_manager.dispatch()
        if self.model_runner.pcp_manager is not None:
            batch = SimpleNamespace(
                num_reqs=3,
                is_prefilling_np=np.array([True, False, False]),
                num_computed_tokens_np=np.array([4, 2, 3]),
            )
            self.model_runner.pcp_manager.partition_batch(batch, None)


def run(manager, fault="", num_tokens=7):
    worker = Worker(manager)
    worker.pcpbench_watch(fault)
    worker.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=num_tokens))
    return worker


def test_steps_are_counted_by_what_was_done_with_them():
    counts = run(Manager()).pcpbench_counts()
    expected = {"steps": 1, "partitioned": 1, "mixed": 1, "continued": 1, "uneven": 1, "empty": 0}
    assert {name: counts[name] for name in expected} == expected
    assert counts["modes"] == {"FULL": 1}


def test_a_worker_tells_what_it_is_and_not_what_was_asked_for():
    worker = Worker(Manager())
    told = worker.pcpbench_watch("")
    assert (told["pcp_size"], told["dcp_size"], told["cudagraph_mode"]) == (2, 2, "PIECEWISE")
    worker.model_runner.dcp_size = 1
    assert worker.pcpbench_watch("")["dcp_size"] == 1


def test_counts_begin_anew_each_time():
    worker = run(Manager())
    worker.pcpbench_counts()
    counts = worker.pcpbench_counts()
    assert counts["steps"] == counts["partitioned"] == 0
    assert counts["modes"] == {}


def test_batches_are_looked_into_in_the_first_generation_only():
    worker = run(Manager())
    worker.pcpbench_counts()
    worker.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=7))
    counts = worker.pcpbench_counts()
    assert (counts["steps"], counts["partitioned"], counts["uneven"]) == (1, 1, 0)


def test_a_fault_acts_in_every_generation():
    worker = run(Manager(), "kv-writer")
    worker.pcpbench_counts()
    worker.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=7))
    assert worker.pcpbench_counts()["faulted"] == 1


def test_an_even_step_is_not_uneven_and_an_empty_rank_is_seen():
    assert run(Manager([0, 4])).pcpbench_counts()["uneven"] == 0
    assert run(Manager([0, 1, 2])).pcpbench_counts()["empty"] == 1


def test_the_restore_that_forgets_padding():
    manager = Manager()
    assert run(manager, "hidden-restore").pcpbench_counts()["faulted"] == 1
    assert manager._hidden_restore_idx.tolist() == [0, 1, 3, 4, 5, 6, 2]


def test_it_changes_nothing_where_ranks_are_even():
    manager = Manager([0, 1, 2, 3, 4, 5, 6, 7])
    assert run(manager, "hidden-restore").pcpbench_counts()["faulted"] == 0


def test_the_token_that_nobody_writes():
    manager = Manager()
    assert run(manager, "kv-writer").pcpbench_counts()["faulted"] == 1
    assert manager._gathered_kv_write_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 3


def test_a_fault_needs_a_pcp_manager():
    with pytest.raises(RuntimeError, match="no PCP manager"):
        Worker(None).pcpbench_watch("kv-writer")
    assert run(None).pcpbench_counts()["partitioned"] == 0
