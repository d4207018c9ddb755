"""What a worker process of vLLM is asked to watch: a `worker_extension_cls`, vLLM's own mechanism.

Runs inside vLLM's workers and imports nothing of pcpbench. It counts the steps that the model
runner executes, by what dispatch chose for them and by how the PCP manager cut them, so that a run
that never sharded anything, or an arm of graphs that never replayed, cannot pass. It can also plant
one of FAULTS into this worker, to show that a comparison sees it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Fault = Callable[[Any, Any, NDArray[np.int64]], bool]


class EngineWatch:
    """Methods that vLLM's Worker gains; called through `LLM.collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    _pcpbench_counts: dict[str, Any]

    def pcpbench_watch(self, fault: str) -> dict[str, Any]:
        """Begin to count, plant the fault if one is named, and tell what this worker is."""
        runner = self.model_runner
        counts = _new_counts()
        self._pcpbench_counts = counts
        _count_steps(runner, counts)
        _count_dispatch(getattr(runner, "cudagraph_manager", None), counts)
        manager = getattr(runner, "pcp_manager", None)
        _count_partitions(manager, counts, FAULTS[fault] if fault else None)
        config = self.vllm_config
        graphs = getattr(runner, "cudagraph_manager", None)  # what came of the mode asked for
        mode = getattr(graphs, "cudagraph_mode", config.compilation_config.cudagraph_mode)
        return {
            "rank": int(getattr(self, "rank", 0)),
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
            "pcp_manager": manager is not None,
            "pcp_size": int(getattr(manager, "pcp_world_size", 1)),
            "dcp_size": int(
                getattr(runner, "dcp_size", config.parallel_config.decode_context_parallel_size)
            ),
            "cudagraph_mode": getattr(mode, "name", str(mode)),
        }

    def pcpbench_counts(self) -> dict[str, Any]:
        """What was counted since the last call; the first call ends the close look at batches."""
        told = dict(self._pcpbench_counts, rank=int(getattr(self, "rank", 0)))
        self._pcpbench_counts.update(_new_counts(), looks=False)
        return told


def _new_counts() -> dict[str, Any]:
    """steps: executed. modes: of these, by what dispatch chose. partitioned: cut by the PCP
    manager; of these, mixed: with prefills and decodes; uneven: ranks with unequal tokens; empty:
    some rank without a token; continued: with a prefill that had begun before; faulted: in which
    the planted fault changed something. looks: whether batches are looked into at all: not in timed
    generations, where waiting for a device's indices would be measured."""
    names = ("steps", "partitioned", "mixed", "uneven", "empty", "continued", "faulted")
    return {**dict.fromkeys(names, 0), "modes": {}, "looks": True}


def _count_steps(runner: Any, counts: dict[str, Any]) -> None:
    execute = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **settings: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens and not settings.get("dummy_run"):
            counts["steps"] += 1
        return execute(scheduler_output, *args, **settings)

    runner.execute_model = execute_model


def _count_dispatch(manager: Any, counts: dict[str, Any]) -> None:
    if manager is None or not hasattr(manager, "dispatch"):
        return
    choose = manager.dispatch

    def dispatch(*args: Any, **settings: Any) -> Any:
        chosen = choose(*args, **settings)
        name = getattr(chosen.cg_mode, "name", str(chosen.cg_mode))
        counts["modes"][name] = counts["modes"].get(name, 0) + 1
        return chosen

    manager.dispatch = dispatch


def _count_partitions(manager: Any, counts: dict[str, Any], fault: Fault | None) -> None:
    if manager is None:
        if fault is not None:
            raise RuntimeError("no fault can be planted: this worker has no PCP manager")
        return
    cut = manager.partition_batch

    def partition_batch(batch: Any, *args: Any, **settings: Any) -> Any:
        local = cut(batch, *args, **settings)
        counts["partitioned"] += 1
        if fault is None and not counts["looks"]:
            return local
        prefilling = np.asarray(batch.is_prefilling_np[: batch.num_reqs], dtype=bool)
        computed = np.asarray(batch.num_computed_tokens_np[: batch.num_reqs])
        per_rank = _tokens_per_rank(manager, local)
        counts["mixed"] += bool(prefilling.any() and not prefilling.all())
        counts["continued"] += bool((prefilling & (computed > 0)).any())
        counts["uneven"] += bool(per_rank.min() < per_rank.max())
        counts["empty"] += bool(per_rank.min() == 0)
        if fault is not None:
            counts["faulted"] += bool(fault(manager, local, per_rank))
        return local

    manager.partition_batch = partition_batch


def _tokens_per_rank(manager: Any, local: Any) -> NDArray[np.int64]:
    """Tokens that each rank of the PCP group answers for, from where the restore takes them.

    Two ranks padded to 4, restore [0, 1, 4, 5, 6, 7, 2]: ranks 0 0 1 1 1 1 0 own 3 and 4 tokens.
    """
    found = manager._hidden_restore_idx.cpu().numpy() // local.num_tokens_after_padding
    return np.bincount(found, minlength=manager.pcp_world_size)


def _shift_restore(manager: Any, local: Any, per_rank: NDArray[np.int64]) -> bool:
    """The restore forgets that ranks are padded: it takes rank r's rows from behind the real rows
    of the ranks before it. Changes something only where an earlier rank has fewer than the most."""
    index = manager._hidden_restore_idx
    rank, row = index // local.num_tokens_after_padding, index % local.num_tokens_after_padding
    starts = np.concatenate([[0], np.cumsum(per_rank)[:-1]])
    wrong = index.new_tensor(starts)[rank] + row
    changed = bool((wrong != index).any())
    manager._hidden_restore_idx = wrong
    return changed


def _drop_writer(manager: Any, local: Any, per_rank: NDArray[np.int64]) -> bool:
    """Nobody writes the KV of the first token that the last rank with tokens owns."""
    start = int(np.flatnonzero(per_rank)[-1]) * local.num_tokens_after_padding
    mask = manager._gathered_kv_write_mask
    owned = mask[start : start + local.num_tokens_after_padding].nonzero()
    if not len(owned):
        return False
    mask[start + int(owned[0])] = False
    return True


FAULTS: dict[str, Fault] = {"hidden-restore": _shift_restore, "kv-writer": _drop_writer}
