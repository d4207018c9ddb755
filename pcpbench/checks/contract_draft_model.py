"""C22: every pass of a draft model is given what the plan says, on buffers of its own (SPEC 7, 10).

Owns the rebuild of a pass: rows, tokens, lengths, DCP-local lengths, tables and slots, its graph,
and that what is proposed follows from the logits on every rank alike. What a pass computes is held
bit for bit by C13, what it writes by C15.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pcpbench.checks.contract_idle import spread
from pcpbench.checks.draft_hidden import hidden_message
from pcpbench.checks.findings import StepView, mismatch, nonzero
from pcpbench.checks.oracle import RankExpectation
from pcpbench.checks.oracle_drafts import DraftExpectation
from pcpbench.checks.oracle_tables import PAD, UNKNOWN_TOKEN, dcp_share
from pcpbench.checks.setup import ArmSetup
from pcpbench.modes import CUDAGraphMode
from pcpbench.plan import ScenarioPlan
from pcpbench.records import BoolArray, DraftPassRecord, IntArray, RankRecord, Violation

Finding = tuple[str, str]
"""A tensor, and a sentence on what is wrong with it; an empty one where nothing is."""

FULL = CUDAGraphMode.FULL


@dataclass(frozen=True, kw_only=True)
class _Right:
    """What a pass should hold (R rows, T tokens after padding), shaped as in DraftPassRecord.

    block_ids[group]: of the real rows, only the columns that they have.
    """

    num_reqs: int
    num_tokens: int
    input_ids: IntArray
    positions: IntArray
    query_start_loc: IntArray
    seq_lens: IntArray
    block_ids: tuple[tuple[IntArray, ...], ...]
    slot_mappings: IntArray


def check_draft_model(view: StepView) -> Iterator[Violation]:
    """C22 over a step: each pass on each rank, then what was proposed."""
    if view.setup.draft is None:
        return
    for record in view.record.ranks:
        for tensor, message in _rank_findings(view, record):
            if message:
                yield view.violation("C22", record.rank, f"draft.{tensor}", message)


def _rank_findings(view: StepView, record: RankRecord) -> Iterator[Finding]:
    assert view.setup.draft is not None
    num_steps = view.setup.draft.num_steps
    expected = view.expected
    num_passes = min(num_steps, 2) if expected is None else num_steps
    if len(record.draft_passes) != num_passes:
        yield "passes", f"{len(record.draft_passes)} passes of the draft model, not {num_passes}"
        return
    for number, one in enumerate(record.draft_passes):
        for tensor, message in _pass_findings(view, record, number, one):
            yield tensor, message and f"pass {number} ({one.descriptor.label}): {message}"
    if expected is not None and expected.draft is not None:
        yield from _proposal_findings(view, record, expected.draft)


def _pass_findings(
    view: StepView, record: RankRecord, number: int, one: DraftPassRecord
) -> Iterator[Finding]:
    yield "descriptor", _descriptor_message(view, record, number, one)
    if view.expected is None:
        yield from _idle_findings(view.setup, record, number, one)
        return
    draft, mine = view.expected.draft, view.expected.ranks[record.rank]
    assert draft is not None
    right = _first(view, mine, draft) if number == 0 else _later(record, number, one, draft)
    yield from _array_findings(view.setup, record.rank, one, right)
    yield "hidden_in", hidden_message(view, record, number, one, draft)


def _descriptor_message(
    view: StepView, record: RankRecord, number: int, one: DraftPassRecord
) -> str:
    """The first pass runs as the step, a later one as the smallest graph for all requests."""
    chosen, setup = one.descriptor, view.setup
    assert setup.draft is not None
    if number == 0 and chosen != record.descriptor:
        return f"the step ran as {record.descriptor.label}"
    if number and setup.capture_sizes is not None:
        count = len(view.plan.scheduled) or 1
        fitting = [size for size in next_sizes(setup) if size >= count]
        mode, size = (FULL, fitting[0]) if fitting else (CUDAGraphMode.NONE, count)
        if (chosen.cg_mode, chosen.num_tokens, chosen.num_reqs) != (mode, size, size):
            return f"{count} requests are to run as {mode.name} with {size} rows and tokens"
    replays = int(chosen.cg_mode is FULL and setup.draft.captured is not None)
    if one.num_replays != replays:
        return f"{one.num_replays} graphs were launched, not {replays}"
    return ""


def next_sizes(setup: ArmSetup) -> list[int]:
    """Requests of the graphs of a one-token pass: capture sizes that are numbers of requests."""
    mode = setup.mode if setup.descriptor_mode is None else setup.descriptor_mode
    if mode.decode_mode() is not FULL or setup.draft is None or setup.draft.num_steps < 2:
        return []
    most = setup.draft.max_num_reqs
    return sorted({size for size in setup.capture_sizes or () if size <= most})


def _first(view: StepView, mine: RankExpectation, draft: DraftExpectation) -> _Right:
    """The step's own rows, with the token behind each position."""
    world, total = view.setup.world, mine.num_tokens_after_padding
    place = world.pcp_rank(mine.rank) * total
    tokens = mine.gathered_token[place : place + mine.num_tokens]
    ids = np.zeros(total, dtype=np.int64)
    ids[: mine.num_tokens] = _following(view, draft)[tokens]
    return _Right(
        num_reqs=mine.num_reqs,
        num_tokens=mine.num_tokens,
        input_ids=ids,
        positions=mine.positions,
        query_start_loc=mine.query_start_loc,
        seq_lens=mine.seq_lens,
        block_ids=mine.block_ids,
        slot_mappings=mine.slot_mappings,
    )


def _following(view: StepView, draft: DraftExpectation) -> IntArray:
    """The token behind each token of the global batch; 0 behind a rejected draft.

    Where a request samples, the tokens behind its last ones are those fed on.
    """
    following, fed = np.array(draft.following), view.fed
    end = row = 0
    for request in view.plan.scheduled:
        end += request.num_scheduled_tokens
        for place in range(request.num_logits):
            token = end - request.num_logits + place
            if place >= request.num_output_tokens:
                following[token] = 0
            else:
                following[token] = UNKNOWN_TOKEN if fed is None else fed[row + place]
        row += request.num_logits
    return following


def _later(
    record: RankRecord, number: int, one: DraftPassRecord, draft: DraftExpectation
) -> _Right:
    """One token of each request of the global batch, on every rank; FULL pads to its graph."""
    positions = draft.positions[number - 1]
    rows = total = count = len(positions)
    chosen = one.descriptor
    if chosen.cg_mode is FULL:
        rows, total = max(count, chosen.num_reqs or 0), max(count, chosen.num_tokens)
    ids = np.full(count, UNKNOWN_TOKEN, dtype=np.int64)
    if record.proposed is not None and record.proposed.shape[0] == count:
        ids = record.proposed[:, number - 1].astype(np.int64)
    starts = np.full(rows + 1, count, dtype=np.int64)
    starts[: count + 1] = np.arange(count + 1)
    slots = draft.slots[record.rank][number - 1]
    gathered = np.full((len(slots), total), PAD, dtype=np.int64)
    gathered[:, :count] = slots
    return _Right(
        num_reqs=count,
        num_tokens=count,
        input_ids=_padded(ids, total),
        positions=_padded(positions, total),
        query_start_loc=starts,
        seq_lens=_padded(positions + 1, rows),
        block_ids=draft.block_ids,
        slot_mappings=gathered,
    )


def _array_findings(
    setup: ArmSetup, rank: int, one: DraftPassRecord, right: _Right
) -> Iterator[Finding]:
    """Padding first, by the expected counts, then the real part."""
    if (one.num_reqs, one.num_tokens) != (right.num_reqs, right.num_tokens):
        counts = f"{one.num_reqs} rows and {one.num_tokens} tokens"
        yield "num_reqs", f"{counts}, expected {right.num_reqs} and {right.num_tokens}"
        return
    total, rows = len(right.input_ids), len(right.seq_lens)
    if (one.num_reqs_after_padding, one.num_tokens_after_padding) != (rows, total):
        yield from _padded_counts(one, rows, total)
        return
    flags: BoolArray = np.arange(total) >= right.num_tokens
    yield "is_padding", mismatch("is_padding", one.is_padding, flags, "padding at the end")
    unknown = right.input_ids == UNKNOWN_TOKEN
    what = f"{right.num_tokens} real tokens of {total}"
    yield "input_ids", mismatch("input_ids", one.input_ids, right.input_ids, what, unknown)
    yield "positions", mismatch("positions", one.positions, right.positions, what)
    if one.query_start_loc is None or one.seq_lens is None:
        yield "seq_lens", "there are no attention inputs"
        return
    what = f"{right.num_reqs} real rows of {rows}"
    found = one.query_start_loc
    yield "query_start_loc", mismatch("query_start_loc", found, right.query_start_loc, what)
    yield "seq_lens", mismatch("seq_lens", one.seq_lens, right.seq_lens, what)
    yield "dcp_local_seq_lens", _shares_message(setup, rank, one, right.seq_lens)
    yield "block_tables", _tables_message(one, right)
    found = one.slot_mappings
    yield "slot_mappings", mismatch("slot_mappings", found, right.slot_mappings, what)


def _padded_counts(one: DraftPassRecord, rows: int, total: int) -> Iterator[Finding]:
    for name, right in (("num_reqs_after_padding", rows), ("num_tokens_after_padding", total)):
        found = getattr(one, name)
        if found != right:
            yield name, f"{name} is {found}, expected {right}"


def _shares_message(setup: ArmSetup, rank: int, one: DraftPassRecord, seq_lens: IntArray) -> str:
    """The rank's share of the pass's own lengths, 0 in padding rows (SPEC 7)."""
    name, world, found = "dcp_local_seq_lens", setup.world, one.dcp_local_seq_lens
    if found is None or world.dcp_size == 1:
        is_right = found is None and world.dcp_size == 1
        state = "missing" if found is None else "present"
        return "" if is_right else f"{name} is {state} with a DCP size of {world.dcp_size}"
    me = world.dcp_rank(rank)
    shares = [dcp_share(int(n), world.dcp_size, me, setup.interleave) for n in seq_lens]
    what = f"DCP rank {me}'s share of the pass's own seq_lens"
    return mismatch(name, found, np.array(shares, dtype=np.int64), what)


def _tables_message(one: DraftPassRecord, right: _Right) -> str:
    if len(one.block_tables) != len(right.block_ids):
        return f"{len(one.block_tables)} block tables for {len(right.block_ids)} KV groups"
    for group, (table, blocks) in enumerate(zip(one.block_tables, right.block_ids, strict=True)):
        name = f"block_tables[{group}]"
        if len(table) != len(right.seq_lens):
            return f"{name} has {len(table)} rows, expected {len(right.seq_lens)}"
        message = nonzero(name, table, right.num_reqs, f"padding row, {right.num_reqs} real")
        for row, ids in enumerate(blocks):
            message = message or mismatch(
                f"{name}[{row}]", table[row, : len(ids)], ids, "blocks of its request"
            )
        if message:
            return message
    return ""


def _proposal_findings(
    view: StepView, record: RankRecord, draft: DraftExpectation
) -> Iterator[Finding]:
    """Rows that requests are drafted from; best tokens of the recorded logits, on every rank."""
    logits, proposed = view.record.draft_logits, record.proposed
    if proposed is None or logits is None or record.draft_rows is None:
        yield "proposed", "nothing was proposed"
        return
    what = "last kept token of each request"
    yield "draft_rows", mismatch("draft_rows", record.draft_rows, draft.rows, what)
    shape = (len(view.plan.scheduled), len(record.draft_passes))
    if proposed.shape != shape or logits.shape[:2] != shape[::-1]:
        yield "proposed", f"{list(proposed.shape)} drafts, expected {list(shape)}"
        return
    if not ((proposed >= 0) & (proposed < logits.shape[-1])).all():
        yield "proposed", "a draft is outside the vocabulary"
        return
    chosen = np.take_along_axis(logits, proposed.T[:, :, None].astype(np.int64), axis=2)[..., 0]
    worse = np.argwhere(~(chosen == logits.max(axis=2)) & np.isfinite(logits).all(axis=2))
    if len(worse):
        number, row = worse[0].tolist()
        request = view.plan.scheduled[row].req_id
        yield "proposed", f"draft {number} of request {request} is not the one that scores best"


def _idle_findings(
    setup: ArmSetup, record: RankRecord, number: int, one: DraftPassRecord
) -> Iterator[Finding]:
    """A dummy batch: all padding, null blocks, PAD slots; dcp x interleave of context in FULL.

    The first pass has the rows and tokens of the step's own dummy batch, the second those of its
    descriptor, spread evenly.
    """
    rows, total = record.num_reqs, record.num_tokens
    if number:
        rows, total = one.descriptor.num_reqs or 0, one.descriptor.num_tokens
    if (one.num_reqs, one.num_tokens) != (rows, total):
        counts = f"{one.num_reqs} rows and {one.num_tokens} tokens"
        yield "num_reqs", f"{counts}, expected {rows} and {total}"
        return
    if (one.num_reqs_after_padding, one.num_tokens_after_padding) != (rows, total):
        yield from _padded_counts(one, rows, total)
        return
    nothing = np.zeros(total, dtype=np.int64)
    for name in ("input_ids", "positions"):
        yield name, mismatch(name, getattr(one, name), nothing, "dummy token")
    flags = np.ones(total, dtype=np.bool_)
    yield "is_padding", mismatch("is_padding", one.is_padding, flags, "dummy token")
    if one.seq_lens is None or one.query_start_loc is None:
        lacks = one.descriptor.cg_mode is FULL
        yield "seq_lens", "a FULL dummy pass has no attention inputs" if lacks else ""
        return
    query_lens = spread(total, rows)
    starts = np.append(0, np.cumsum(query_lens))
    what = f"{total} dummy tokens spread over {rows} rows"
    yield "query_start_loc", mismatch("query_start_loc", one.query_start_loc, starts, what)
    world = setup.world
    context = world.dcp_size * setup.interleave if world.dcp_size > 1 else 0
    if setup.max_model_len is not None:
        room = np.clip(setup.max_model_len - query_lens, 0, context)
    else:
        room = np.full(len(query_lens), context)
    what = f"dummy row with {context} tokens of context"
    yield "seq_lens", mismatch("seq_lens", one.seq_lens, query_lens + room, what)
    yield "dcp_local_seq_lens", _shares_message(setup, record.rank, one, query_lens + room)
    for group, table in enumerate(one.block_tables):
        name = f"block_tables[{group}]"
        lacks = len(table) != rows
        yield "block_tables", f"{name} has {len(table)} rows, expected {rows}" if lacks else ""
        yield "block_tables", nonzero(name, table, 0, "dummy row")
    slots = np.full((len(one.slot_mappings), total * (1 if number else world.pcp_size)), PAD)
    what = "slot of a dummy token"
    yield "slot_mappings", mismatch("slot_mappings", one.slot_mappings, slots, what)


def draft_graph_violations(setup: ArmSetup, plan: ScenarioPlan) -> Iterator[Violation]:
    """C22 over an arm's graphs: one for each shape that a pass can have, each of them whole."""
    for message in _graph_messages(setup):
        yield Violation(
            contract="C22",
            arm=setup.name,
            scenario=plan.scenario,
            step=plan.steps[0].index if plan.steps else 0,
            rank=None,
            tensor="draft.graphs",
            message=message,
        )


def _graph_messages(setup: ArmSetup) -> Iterator[str]:
    if setup.draft is None or setup.draft.captured is None or setup.capture_sizes is None:
        return
    wanted = {f"draft first {d.label}" for d in setup.candidates if d.cg_mode is FULL}
    wanted |= {f"draft next FULL[reqs={size},tokens={size}]" for size in next_sizes(setup)}
    found = {graph.descriptor for graph in setup.draft.captured}
    for label in sorted(wanted - found):
        yield f"{label} was not captured"
    for label in sorted(found - wanted):
        yield f"{label} was captured and is no shape of a draft pass"
    for graph in setup.draft.captured:
        if graph.eager_breaks:
            yield f"{graph.descriptor} has {graph.eager_breaks} eager breaks"


def _padded(values: IntArray, total: int) -> IntArray:
    out = np.zeros(total, dtype=np.int64)
    out[: len(values)] = values
    return out
