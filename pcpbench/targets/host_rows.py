"""What the host knows of each rank's batch in a step, of an arm of either engine.

Owns the reading of it, which records leave out: what a forward pass of pcpbench's model does not
read, vLLM's attention backends do. Judges nothing.
"""

from __future__ import annotations

from pcpbench.engine.host_copies import host_copy
from pcpbench.partition_results import Value, batch_fields
from pcpbench.targets.builtin import BuiltinArm
from pcpbench.targets.engine_errors import engine_errors


def host_rows(arm: BuiltinArm) -> list[dict[str, Value]]:
    """The fields of every rank of the step that the arm has run last; not of an idle one.

    Raises EngineError for what the engine's batch does not have.
    """
    found = []
    with engine_errors():
        for worker in arm.engine.workers:
            fields = batch_fields(worker.local_batch)
            if worker.pcp_manager is not None:
                fields["padded_gather_idx"] = host_copy(worker.pcp_manager.padded_gather_idx)
            found.append(fields)
    return found
