"""Names every persistent tensor of an engine for the address book. Owns names only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from pcpbench.device.address_book import AddressBook
from pcpbench.engine.worker import Worker
from pcpbench.model.decoder import MLADecoder

INPUT_BUFFER_FIELDS = (
    "input_ids",
    "positions",
    "is_padding",
    "query_start_loc",
    "seq_lens",
    "dcp_local_seq_lens",
)

MOE_IS_PADDING = "moe_is_padding"
"""The flags of all PCP ranks' tokens, among a manager's buffers where it has them."""


def register_buffers(
    book: AddressBook, workers: Sequence[Worker], shards: Sequence[MLADecoder]
) -> None:
    """Register each worker's buffers as `rank0.input_ids` and each shard's weights as `tp0.…`."""
    for worker in workers:
        prefix = f"rank{worker.rank}"
        for field in INPUT_BUFFER_FIELDS:
            book.register(f"{prefix}.{field}", partial(_field, partial(_buffers, worker), field))
        if worker.pcp_manager is not None:
            manager = worker.pcp_manager
            for field in INPUT_BUFFER_FIELDS:
                getter = partial(_field, partial(getattr, worker, "input_buffers"), field)
                book.register(f"{prefix}.global.{field}", getter)
            for name in manager.persistent_buffers():
                book.register(f"{prefix}.{name}", partial(_named, manager.persistent_buffers, name))
        tables = worker.block_tables
        for name in tables.persistent_buffers():
            book.register(
                f"{prefix}.global.{name}", partial(_named, tables.persistent_buffers, name)
            )
        for layer in range(len(worker.kv_caches)):
            book.register(f"{prefix}.kv_cache.{layer}", partial(_item, worker, layer))
        _register_selected(book, worker)
        output = partial(getattr, worker, "hidden_states")
        book.register(f"{prefix}.hidden_states", output, scratch=True)
        _register_taps(book, worker)
        _register_routing(book, worker)
        _register_microbatches(book, worker)
    for tp_rank, shard in enumerate(shards):
        for name in dict(shard.state_dict(keep_vars=True)):
            book.register(f"tp{tp_rank}.{name}", partial(_weight, shard, name))


def _register_selected(book: AddressBook, worker: Worker) -> None:
    if worker.context.selected is not None:
        selected = partial(getattr, worker.context, "selected")
        book.register(f"rank{worker.rank}.selected_positions", selected, scratch=True)


def _register_taps(book: AddressBook, worker: Worker) -> None:
    if worker.taps is None:
        return
    for name in worker.taps.named():
        book.register(f"rank{worker.rank}.{name}", partial(_named, worker.taps.named, name))


def _register_routing(book: AddressBook, worker: Worker) -> None:
    for index, own in enumerate(worker.routing_buffers()):
        prefix = f"rank{worker.rank}." + (f"ubatch{index - 1}." if index else "")
        for name in own.named():
            book.register(prefix + name, partial(_named, own.named, name), scratch=True)


def _register_microbatches(book: AddressBook, worker: Worker) -> None:
    for index, own in enumerate(worker.microbatches.buffers if worker.microbatches else ()):
        for name in own.named():
            label = f"rank{worker.rank}.ubatch{index}.{name}"
            book.register(label, partial(_named, own.named, name))


def _buffers(worker: Worker) -> Any:
    return worker.local_buffers


def _field(owner: Callable[[], Any], field: str) -> Tensor:
    tensor: Tensor = getattr(owner(), field)
    return tensor


def _named(owner: Callable[[], dict[str, Tensor]], name: str) -> Tensor:
    return owner()[name]


def _item(worker: Worker, layer: int) -> Tensor:
    return worker.kv_caches[layer]


def _weight(shard: MLADecoder, name: str) -> Tensor:
    module_path, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(shard.get_submodule(module_path), leaf)
    return tensor
