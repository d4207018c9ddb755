"""What a step runs through the model, for faults that change what a forward pass is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pcpbench.engine.input_batch import InputBatch
from pcpbench.engine.worker import Worker
from pcpbench.model.context import AttentionMetadata, ForwardContext

Change = Callable[[AttentionMetadata], AttentionMetadata | None]


def passes_of(worker: Worker) -> list[tuple[InputBatch, ForwardContext]]:
    """The local batch and its context, or those of its microbatches."""
    halves = worker.microbatches
    if halves is not None and halves.parts:
        return [(p.batch, c) for p, c in zip(halves.parts, halves.contexts, strict=True)]
    assert worker.local_batch is not None
    return [(worker.local_batch, worker.context)]


@contextmanager
def changed_metadata(worker: Worker, change: Change) -> Iterator[None]:
    """Forward passes inside the block get changed metadata; the worker's own stays as it is.

    A pass without metadata, which skips attention, is left alone.
    """
    contexts = [context for _, context in passes_of(worker)]
    kept = [context.metadata for context in contexts]
    for context, metadata in zip(contexts, kept, strict=True):
        context.metadata = None if metadata is None else change(metadata)
    try:
        yield
    finally:
        for context, metadata in zip(contexts, kept, strict=True):
            context.metadata = metadata
