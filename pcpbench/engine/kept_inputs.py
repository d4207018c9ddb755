"""One worker's inputs of the step that was prepared last, kept so that they can be put back.

Owns which state that is: what a dummy run stages over. KV caches, global block tables, outputs and
workspaces are no inputs and stay as dummy runs leave them.
"""

from __future__ import annotations

from torch import Tensor

from pcpbench.engine.buffers import INPUT_BUFFER_FIELDS
from pcpbench.engine.worker import Worker


class KeptInputs:
    """Copies of a worker's step inputs, made when this is built."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._batch, self._metadata = worker.local_batch, worker.context.metadata
        self._breaks = worker.context.breaks
        self._parts = None if worker.microbatches is None else worker.microbatches.parts
        self._copies = [(tensor, tensor.clone()) for tensor in _step_inputs(worker)]

    def put_back(self) -> None:
        """Make the kept step the prepared one again."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        worker = self._worker
        worker.local_batch, worker.context.metadata = self._batch, self._metadata
        worker.context.breaks = self._breaks
        if worker.microbatches is not None and self._parts is not None:
            worker.microbatches.resume(self._parts)


def _step_inputs(worker: Worker) -> list[Tensor]:
    owners = {id(buffers): buffers for buffers in (worker.input_buffers, worker.local_buffers)}
    tensors = [
        getattr(buffers, name) for buffers in owners.values() for name in INPUT_BUFFER_FIELDS
    ]
    tensors += [*worker.block_tables.input_block_tables, worker.block_tables.slot_mappings]
    manager = worker.pcp_manager
    if manager is not None:
        tensors += manager.persistent_buffers().values()
    for own in () if worker.microbatches is None else worker.microbatches.buffers:
        tensors += own.named().values()
    return tensors
