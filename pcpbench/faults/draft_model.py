"""Faults of a draft model behind the target model: what its passes are given, and its graphs.

All of them are the same on every arm, but those of graphs: what the passes are given is held
against the plan (C22).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from pcpbench.engine import draft_model, draft_runner
from pcpbench.engine.block_table import PAD_SLOT_ID, BlockTables
from pcpbench.engine.draft_model import DraftWorker
from pcpbench.engine.input_batch import InputBuffers
from pcpbench.faults.classes import DCP, PCP, SPARSE, shipped
from pcpbench.faults.fault import PARTITION_DRIFT, Fault, Site
from pcpbench.model.context import ForwardContext
from pcpbench.model.mla import MLAAttention
from pcpbench.model.mtp import MTPModule
from pcpbench.modes import BatchExecutionDescriptor

MTP: Final = replace(PCP, spec_tokens=3, draft_model="mtp")
DCP_MTP: Final = replace(DCP, spec_tokens=3, draft_model="mtp")
SPARSE_MTP: Final = replace(SPARSE, spec_tokens=3, draft_model="mtp")


def _drafting(site: Site) -> list[DraftWorker]:
    return [rank for one in site.engines.values() if one.drafts for rank in one.drafts.ranks]


def target_dcp_lengths(site: Site) -> None:
    """All passes read the target's DCP-local lengths."""

    def faulty(prepare: Callable[..., Tensor | None], self: DraftWorker, lens: Tensor) -> Any:
        sound = prepare(self, lens)
        if sound is None:
            return None
        found = self.worker.local_buffers.dcp_local_seq_lens[: len(sound)]
        if not found.equal(sound):
            site.hit()
        return found

    site.wrap(DraftWorker, "_prepare_dcp_lens", faulty)


def dcp_lengths_of_second_pass(site: Site) -> None:
    """DCP-local lengths are made when one-token passes begin, and not again as they go on."""
    later: set[int] = set()

    def advance(original: Callable[..., None], self: DraftWorker) -> None:
        later.add(id(self))
        original(self)

    def second(original: Callable[..., None], self: DraftWorker, *args: Any) -> None:
        later.discard(id(self))
        original(self, *args)

    def prepare(original: Callable[..., Tensor | None], self: DraftWorker, lens: Tensor) -> Any:
        buffer = self.input_buffers.dcp_local_seq_lens
        before, sound = buffer.clone(), original(self, lens)
        if sound is None or id(self) not in later:
            return sound
        if not before[: len(sound)].equal(sound):
            site.hit()
        buffer.copy_(before)
        return sound

    def first(original: Callable[..., None], self: DraftWorker, *args: Any, **kw: Any) -> None:
        later.discard(id(self))
        original(self, *args, **kw)

    site.wrap(DraftWorker, "advance", advance)
    site.wrap(DraftWorker, "stage_first", first)
    site.wrap(DraftWorker, "stage_second", second)
    site.wrap(DraftWorker, "_prepare_dcp_lens", prepare)


def _advance_without(site: Site, kept: str) -> None:
    def faulty(advance: Callable[..., None], self: DraftWorker) -> None:
        buffer: Tensor = getattr(self.input_buffers, kept)
        before = buffer.clone()
        advance(self)
        if not buffer.equal(before):
            site.hit()
        buffer.copy_(before)

    site.wrap(DraftWorker, "advance", faulty)


def lengths_not_advanced(site: Site) -> None:
    """Lengths stay where the second pass had them."""
    _advance_without(site, "seq_lens")


def positions_not_advanced(site: Site) -> None:
    """Positions stay where the second pass had them."""
    _advance_without(site, "positions")


def padded_rows_kept(site: Site) -> None:
    """Lengths past the requests of a one-token pass are what an earlier pass left."""
    mine = {id(rank.input_buffers) for rank in _drafting(site)}

    def faulty(pad: Callable[..., None], self: InputBuffers, num_reqs: int, *rest: int) -> None:
        before = self.seq_lens.clone()
        pad(self, num_reqs, *rest)
        if id(self) not in mine:
            return
        if not before[num_reqs : rest[0]].equal(self.seq_lens[num_reqs : rest[0]]):
            site.hit()
        self.seq_lens[num_reqs:].copy_(before[num_reqs:])

    site.wrap(InputBuffers, "pad", faulty)


def padding_not_counted(site: Site) -> None:
    """A one-token pass that runs as a graph ends at its requests: metadata, slots and all.

    What it is padded with is in its buffers, or the graph would raise.
    """

    def faulty(
        stage: Callable[..., None], self: DraftWorker, descriptor: BatchExecutionDescriptor
    ) -> None:
        stage(self, descriptor)
        counts = self._counts
        if counts.num_reqs != counts.num_reqs_after_padding:
            site.hit()
        self._counts = replace(
            counts,
            num_reqs_after_padding=counts.num_reqs,
            num_tokens_after_padding=counts.num_tokens,
        )

    site.wrap(DraftWorker, "stage_second", faulty)


def padded_slots_kept(site: Site) -> None:
    """Slots past the requests of a one-token pass are those of an earlier, larger one."""
    mine = {id(rank.slot_mappings) for rank in _drafting(site)}

    def faulty(
        write: Callable[..., Tensor], self: BlockTables, idx: Tensor, *args: Any, **kw: Any
    ) -> Tensor:
        out = kw.get("out")
        if out is None or id(out) not in mine:
            return write(self, idx, *args, **kw)
        before, count = out.clone(), len(idx)
        found = write(self, idx, *args, **kw)
        if not before[:, count : found.shape[1]].equal(found[:, count:]):
            site.hit()
        out[:, count:].copy_(before[:, count:])
        return found

    site.wrap(BlockTables, "compute_slot_mappings", faulty)


def padded_tables_kept(site: Site) -> None:
    """Table rows past the requests of a one-token pass are those of an earlier, larger one."""
    mine = {id(rank.input_block_tables) for rank in _drafting(site)}

    def faulty(
        gather: Callable[..., Any], self: BlockTables, idx: Tensor, rows: int, *args: Any, **kw: Any
    ) -> Any:
        out = args[0] if args else kw.get("out")
        if out is None or id(out) not in mine:
            return gather(self, idx, rows, *args, **kw)
        before, count = [table.clone() for table in out], len(idx)
        found = gather(self, idx, rows, *args, **kw)
        for table, old in zip(out, before, strict=True):
            if not table[count:rows].equal(old[count:rows]):
                site.hit()
            table[count:].copy_(old[count:])
        return found

    site.wrap(BlockTables, "gather_block_tables", faulty)


def behind_rejected_drafts(site: Site) -> None:
    """One-token passes stand behind the whole query, rejected drafts and all."""

    def faulty(
        stage: Callable[..., None], self: DraftWorker, descriptor: BatchExecutionDescriptor
    ) -> None:
        state, batch = self.worker.request_state, self.worker.global_batch
        assert batch is not None
        sound = state.num_computed_tokens
        believed = sound.clone()
        ends = batch.positions.index_select(0, batch.query_start_loc[1:].long() - 1) + 1
        believed[batch.idx_mapping.long()] = ends[: batch.num_reqs].to(believed)
        if not believed.equal(sound):
            site.hit()
        state.num_computed_tokens = believed
        try:
            stage(self, descriptor)
        finally:
            state.num_computed_tokens = sound

    site.wrap(DraftWorker, "stage_second", faulty)


def drafted_from_last_row(site: Site) -> None:
    """Each request is drafted from the last token of its query, though that was rejected."""

    def faulty(choose: Callable[..., None], self: DraftWorker) -> None:
        choose(self)
        batch = self.worker.global_batch
        assert batch is not None
        last = batch.query_start_loc[1 : batch.num_reqs + 1].long() - 1
        if not last.equal(self.draft_rows):
            site.hit()
        self.draft_rows = last

    site.wrap(DraftWorker, "choose_rows", faulty)


def ids_not_shifted(site: Site) -> None:
    """The first pass is fed the token at each position, not the one behind it."""

    def faulty(fill: Callable[..., None], input_ids: Tensor, positions: Tensor, *rest: Any) -> None:
        fill(input_ids, positions, *rest)
        sound = input_ids.clone()
        fill(input_ids, positions - 1, *rest)
        if not input_ids.equal(sound):
            site.hit()

    site.wrap(draft_model, "fill_next_token_ids", faulty)


def _stage_next(site: Site, change: Callable[[DraftWorker, Tensor], Tensor]) -> None:
    """Change the hidden states that one-token passes are fed."""

    def faulty(
        stage: Callable[..., None], self: DraftWorker, drafts: Tensor, hidden: Tensor
    ) -> None:
        wrong = change(self, hidden)
        if not wrong.equal(hidden):
            site.hit()
        stage(self, drafts, wrong)

    site.wrap(DraftWorker, "stage_next", faulty)


def hidden_of_first_pass(site: Site) -> None:
    """All one-token passes are fed what the first pass made."""
    made: dict[int, Tensor] = {}

    def second(original: Callable[..., None], self: DraftWorker, *args: Any) -> None:
        made.pop(id(self), None)
        original(self, *args)

    def change(rank: DraftWorker, hidden: Tensor) -> Tensor:
        return made.setdefault(id(rank), hidden.clone())

    site.wrap(DraftWorker, "stage_second", second)
    _stage_next(site, change)


def hidden_of_neighbour(site: Site) -> None:
    """Each request is fed the hidden state of the one before it."""
    _stage_next(site, lambda _, hidden: hidden.roll(1, 0))


def written_by_first_rank_only(site: Site) -> None:
    """One-token passes, the same on all PCP ranks, write KV on the first of them alone."""

    def faulty(
        stage: Callable[..., None], self: DraftWorker, drafts: Tensor, hidden: Tensor
    ) -> None:
        stage(self, drafts, hidden)
        manager = self.worker.pcp_manager
        if manager is not None and manager.pcp_rank and (self.slot_mappings >= 0).any():
            site.hit()
            self.slot_mappings.fill_(PAD_SLOT_ID)

    site.wrap(DraftWorker, "stage_next", faulty)


def not_merged(site: Site) -> None:
    """The draft model takes its DCP group for one rank: each keeps what its own share gives."""

    async def faulty(
        merge: Callable[..., Any],
        self: MLAAttention,
        partial: Tensor,
        lse: Tensor,
        out: Tensor,
        context: ForwardContext,
    ) -> None:
        await merge(self, partial, lse, out, context)
        if self.shape.num_hidden_layers == 1:
            site.hit()
            first = context.dcp.rank * out.shape[1]
            out.copy_(partial[:, first : first + out.shape[1]])

    site.wrap(MLAAttention, "_merge", faulty)


def captured_without_context(site: Site) -> None:
    """One-token passes are captured with no DCP context, and ranks without any skip attention."""
    is_empty: dict[int, bool] = {}

    def no_context(_: Callable[..., None], *args: Any, **kw: Any) -> None:
        site.hit()

    def look(stage: Callable[..., None], self: DraftWorker, *args: Any) -> None:
        stage(self, *args)
        given = self.context.metadata
        local = None if given is None else given.dcp_local_seq_lens
        is_empty[id(self.context)] = local is not None and not bool(local.any())

    def local(original: Callable[..., None], self: MLAAttention, *args: Any) -> None:
        _, out, lse, _, context = args
        if is_empty.get(id(context)):
            out.zero_()
            lse.fill_(-torch.inf)
        else:
            original(self, *args)

    site.wrap(draft_model, "set_dummy_context", no_context)
    site.wrap(DraftWorker, "stage_dummy", look)
    site.wrap(DraftWorker, "stage_next", look)
    site.wrap(MLAAttention, "_local", local)


def largest_not_captured(site: Site) -> None:
    """The largest one-token pass is not captured."""

    def faulty(build: Callable[..., Any], *args: Any) -> Any:
        found = build(*args)
        if found:
            site.hit()
        return found[1:]

    site.wrap(draft_runner, "decode_descriptors", faulty)


def joined_the_wrong_way(site: Site) -> None:
    """The draft model's layer gets hidden state and embedding in the wrong order, on every arm."""

    def faulty(join: Callable[..., Tensor], embedded: Tensor, hidden: Tensor) -> Tensor:
        site.hit()
        return join(hidden, embedded)

    site.wrap(MTPModule, "join", faulty)


def positions_moved(site: Site) -> None:
    """The draft model's positions are re-created after capture."""
    for engine in site.replaying:
        for rank in engine.drafts.ranks if engine.drafts else ():
            site.hit()
            site.set(rank.input_buffers, "positions", rank.input_buffers.positions.clone())


def weight_rebound(site: Site) -> None:
    """The weight that joins embedding and hidden state is rebound to a copy after capture."""
    for engine in site.replaying:
        for module in engine.drafts.modules if engine.drafts else ():
            site.hit()
            copied = torch.nn.Parameter(module.proj.clone(), requires_grad=False)
            site.set(module, "proj", copied)


def _several_passes(fault: Fault) -> Fault:
    """With one draft there is only the first pass."""
    return replace(fault, min_spec_tokens=2)


FAULTS: Final = (
    *map(_several_passes, (
        shipped("K22", "draft-reuses-target-dcp-lengths", "Passes of the draft model read the "
                "target's DCP-local lengths.", target_dcp_lengths, "C22", setting=DCP_MTP,
                at_capture=True),
        shipped("K22", "draft-dcp-lengths-not-advanced", "The draft model's DCP-local lengths are "
                "not made again as its passes advance.", dcp_lengths_of_second_pass, "C22",
                setting=DCP_MTP),
        shipped("K16", "draft-captured-without-dcp-context", "One-token passes are captured with "
                "no DCP context, and a host-side skip is baked in.", captured_without_context,
                "C13", "C22", setting=DCP_MTP, at_capture=True),
        shipped("K17", "draft-lengths-not-advanced", "The draft model's lengths stay where its "
                "second pass had them.", lengths_not_advanced, "C22", setting=MTP),
        shipped("K17", "draft-positions-not-advanced", "The draft model's positions stay where its "
                "second pass had them.", positions_not_advanced, "C22", setting=MTP),
        shipped("K01", "draft-padded-seq-lens-kept", "Lengths of a one-token pass's padding rows "
                "are what an earlier pass left.", padded_rows_kept, "C22", setting=MTP),
        shipped("K09", "draft-pass-not-padded", "Rows and slots of a one-token pass that runs as "
                "a graph end at its requests.", padding_not_counted, "C22", setting=MTP),
        shipped("K02", "draft-padded-slots-kept", "Slots of a one-token pass's padding are those "
                "of an earlier, larger one.", padded_slots_kept, "C22", setting=MTP),
        shipped("K03", "draft-padded-tables-kept", "Table rows of a one-token pass's padding are "
                "those of an earlier, larger one.", padded_tables_kept, "C22", setting=MTP),
        shipped("K34", "draft-behind-rejected-tokens", "One-token passes stand and write behind "
                "rejected drafts.", behind_rejected_drafts, "C22", setting=MTP),
        shipped("K41", "draft-fed-first-hidden", "All one-token passes are fed what the first pass "
                "made.", hidden_of_first_pass, "C22", setting=MTP),
        shipped("K41", "draft-fed-neighbours-hidden", "One-token passes are fed the hidden state "
                "of the request before.", hidden_of_neighbour, "C22", setting=MTP),
        shipped("K41", "draft-kv-on-first-rank-only", "One-token passes write KV on the first PCP "
                "rank alone.", written_by_first_rank_only, "C22", setting=MTP),
        shipped("K37", "draft-largest-not-captured", "The largest one-token pass of the draft "
                "model has no graph.", largest_not_captured, "C22", setting=MTP, at_capture=True),
    )),
    shipped("K34", "drafted-from-rejected-row", "Requests are drafted from the last token of their "
            "query, though it was rejected.", drafted_from_last_row, "C22", setting=MTP),
    shipped("K41", "draft-ids-not-shifted", "The draft model's first pass is fed the tokens at its "
            "positions, not those behind them.", ids_not_shifted, "C22", setting=MTP),
    shipped("K24", "draft-attention-not-merged", "The draft model does not merge attention over "
            "its DCP group.", not_merged, PARTITION_DRIFT, setting=SPARSE_MTP, at_capture=True),
    shipped("K33", "draft-joined-the-wrong-way", "The draft model's layer gets hidden state and "
            "embedding in the wrong order.", joined_the_wrong_way, "C18", setting=MTP,
            at_capture=True),
    shipped("K10", "draft-positions-moved", "The draft model's positions are re-created after "
            "capture.", positions_moved, "C8", "C13", setting=MTP),
    shipped("K15", "draft-weight-rebound", "A weight of the draft model is rebound to a copy after "
            "capture.", weight_rebound, "C8", setting=MTP),
)  # fmt: skip
