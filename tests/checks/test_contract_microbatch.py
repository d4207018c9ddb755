"""C12, and C1-C6 on each microbatch: the judge's own cut, good records, and broken ones."""

from dataclasses import replace

import numpy as np
import pytest

from pcpbench.checks.contracts import check_step
from pcpbench.checks.findings import StepView
from pcpbench.checks.oracle_microbatch import cut_bounds, cut_expectation
from pcpbench.records import BufferSpan, MicrobatchRecord

WORLDS = {
    "one rank": {},
    "pcp 2": {"pcp": 2},
    "pcp 4": {"pcp": 4},
    "dcp 2": {"tp": 2, "dcp": 2, "interleave": 2},
    "pcp 2 dcp 2": {"pcp": 2, "dcp": 2},
}
TOKENS = ("input_ids", "positions", "is_padding")


def spans_of(index, part):
    """Made-up places: own buffers a megabyte apart, tokens one behind the other."""
    own = ("query_start_loc", "seq_lens", "slot_mappings", "block_tables.0", "dcp_local_seq_lens")
    spans = [BufferSpan(name=n, address=(index + 2) << 20 | i << 12, num_bytes=64)
             for i, n in enumerate(own)]  # fmt: skip
    first, count = part
    spans += [BufferSpan(name=n, address=(1 << 30) + (i << 20) + 4 * first, num_bytes=4 * count)
              for i, n in enumerate(TOKENS)]  # fmt: skip
    return tuple(spans)


def part_of(rank, expected, index, bounds):
    """What an engine that cuts soundly leaves of one microbatch of one rank."""
    first, last = bounds
    tables = []
    for rows in expected.block_ids:
        table = np.zeros((expected.num_reqs_after_padding, 24), dtype=np.int32)
        for row, blocks in enumerate(rows):
            table[row, : len(blocks)] = blocks
        tables.append(table)
    starts = rank.query_start_loc
    held = [
        row for row in range(rank.num_reqs) if max(first, starts[row]) < min(last, starts[row + 1])
    ]
    local = expected.dcp_local_seq_lens
    return MicrobatchRecord(
        first_token=first,
        num_reqs=expected.num_reqs,
        num_reqs_after_padding=expected.num_reqs_after_padding,
        num_tokens=expected.num_tokens,
        num_tokens_after_padding=last - first,
        row_index=np.array(held or [rank.num_reqs - 1]),
        **{name: getattr(rank, name)[first:last] for name in TOKENS},
        query_start_loc=expected.query_start_loc.astype(np.int32),
        seq_lens=expected.seq_lens.astype(np.int32),
        dcp_local_seq_lens=None if local is None else local.astype(np.int32),
        block_tables=tuple(tables),
        slot_mappings=expected.slot_mappings.copy(),
        spans=spans_of(index, (first, last - first)),
    )


def cut(bench, expected, record, pads_rows=False):
    """The record, run as two microbatches."""
    chosen = replace(record.descriptor, num_ubatches=2)
    steps = cut_expectation(expected, bench.setup, 2, pads_rows)
    ranks = []
    for place, rank in enumerate(record.ranks):
        bounds = cut_bounds(rank.num_tokens_after_padding, 2)
        parts = [part_of(rank, steps[i].ranks[place], i, bounds[i]) for i in range(2)]
        whole = spans_of(-1, (0, rank.num_tokens_after_padding))
        ranks.append(replace(rank, microbatches=tuple(parts), spans=whole, descriptor=chosen))
    return replace(record, ranks=tuple(ranks), descriptor=chosen)


def judge(bench, step, expected, record):
    return check_step(StepView(plan=step, record=record, setup=bench.setup, expected=expected))


@pytest.fixture
def stand(kit):
    """Prompts of 3, 9, 5 and 2 tokens: step 0 prefills them, step 1 decodes all four."""

    def build(index=0, shape=None, **sizes):
        chosen = shape or kit.NONE
        candidates = () if shape is None else (chosen, replace(chosen, num_ubatches=2))
        setup = kit.setup("full", ubatch_thresholds=(2, 4), candidates=candidates, **sizes)
        bench = kit.Bench(kit.make_plan([3, 9, 5, 2], 3, block_size=16), setup)
        step, expected, record = bench.at(index, chosen)
        return bench, step, expected, cut(bench, expected, record, chosen.num_reqs is not None)

    return build


def change(record, index, rank=0, **changes):
    """The record with some fields of one rank's microbatch replaced."""
    ranks = list(record.ranks)
    parts = list(ranks[rank].microbatches)
    parts[index] = replace(parts[index], **changes)
    ranks[rank] = replace(ranks[rank], microbatches=tuple(parts))
    return replace(record, ranks=tuple(ranks))


def put(array, index, value):
    changed = np.array(array)
    changed[index] = value
    return changed


def accusations(stand, record):
    return {(v.contract, v.rank, v.tensor) for v in judge(*stand[:3], record)}


# The judge's own cut


def test_the_cut_is_worked_out_by_hand(stand):
    bench, _, expected, _ = stand()
    first, second = (s.ranks[0] for s in cut_expectation(expected, bench.setup, 2, False))
    # 3 + 9 + 5 + 2 = 19 tokens, cut at 9: the prompt of 9 has 6 tokens before it and 3 after.
    assert [(r.req_index, r.start, r.num_tokens) for r in first.rows] == [(0, 0, 3), (1, 0, 6)]
    assert [(r.req_index, r.start, r.num_tokens) for r in second.rows] == [
        (1, 6, 3), (2, 0, 5), (3, 0, 2),
    ]  # fmt: skip
    assert first.query_start_loc.tolist() == [0, 3, 9]
    assert first.seq_lens.tolist() == [3, 6]
    assert second.query_start_loc.tolist() == [0, 3, 8, 10]
    assert second.seq_lens.tolist() == [9, 5, 2]
    assert second.positions.tolist() == [6, 7, 8, 0, 1, 2, 3, 4, 0, 1]


def test_a_half_of_padding_keeps_the_last_request_with_no_tokens(kit, stand):
    bench, _, expected, _ = stand(1, kit.full(8))
    second = cut_expectation(expected, bench.setup, 2, True)[1].ranks[0]
    assert [(r.req_index, r.num_tokens) for r in second.rows] == [(3, 0)]
    assert second.query_start_loc.tolist() == [0] * 5
    assert second.seq_lens.tolist() == [3, 0, 0, 0]
    assert (second.num_reqs, second.num_tokens) == (1, 0)


def test_slots_of_a_half_are_those_of_its_tokens_on_every_rank(stand):
    bench, _, expected, _ = stand(pcp=2)
    total = expected.ranks[0].num_tokens_after_padding
    places = [s.ranks[0].gathered_token for s in cut_expectation(expected, bench.setup, 2, False)]
    whole = expected.ranks[0].gathered_token.reshape(2, total)
    half = total // 2
    assert places[0].tolist() == whole[:, :half].flatten().tolist()
    assert places[1].tolist() == whole[:, half:].flatten().tolist()


# Good records


SHAPES = [(0, None), (1, None), (0, "piecewise"), (1, "full")]
RUNS = [
    pytest.param(world, index, shape, id=f"{world}, step {index}, {shape}")
    for world in WORLDS
    for index, shape in SHAPES
    if not (world == "pcp 4" and index == 1)  # one token a rank: such a step is not cut
]


@pytest.mark.parametrize(("world", "index", "shape"), RUNS)
def test_a_good_record_is_accepted(kit, stand, world, index, shape):
    chosen = {"full": kit.full(8), "piecewise": kit.piecewise(32)}.get(shape)
    bench, step, expected, record = stand(index, chosen, **WORLDS[world])
    assert judge(bench, step, expected, record) == []


def test_a_step_below_its_threshold_runs_whole(kit):
    setup = kit.setup("full", ubatch_thresholds=(5, 20))
    bench = kit.Bench(kit.make_plan([3, 9, 5, 2], 3, block_size=16), setup)
    step, expected, record = bench.at(1)
    assert judge(bench, step, expected, record) == []
    broken = cut(bench, expected, record)
    assert accusations((bench, step, expected), broken) == {("C12", 0, "num_ubatches")}


# Broken records


def test_c12_rejects_a_step_that_was_not_cut(stand):
    bench, step, expected, record = stand(pcp=2)
    whole = replace(record.ranks[1], microbatches=())
    broken = replace(record, ranks=(record.ranks[0], whole))
    assert accusations((bench, step, expected), broken) == {("C12", 1, "num_ubatches")}
    plain = replace(record.descriptor, num_ubatches=1)
    ranks = tuple(replace(r, descriptor=plain, microbatches=()) for r in record.ranks)
    broken = replace(record, ranks=ranks, descriptor=plain)
    found = judge(bench, step, expected, broken)
    assert {(v.contract, v.tensor) for v in found} == {("C12", "num_ubatches")}
    assert "in 1, expected 2" in found[0].message


def test_c12_rejects_a_length_that_was_not_shortened(stand):
    bench, step, expected, record = stand()
    lens = put(record.ranks[0].microbatches[0].seq_lens, 1, 9)
    found = accusations((bench, step, expected), change(record, 0, seq_lens=lens))
    assert {("C12", 0, "ubatch0.seq_lens"), ("C1", 0, "ubatch0.seq_lens")} <= found


def test_c12_rejects_a_query_that_was_not_truncated(stand):
    bench, step, expected, record = stand()
    starts = put(record.ranks[0].microbatches[0].query_start_loc, 2, 12)
    found = accusations((bench, step, expected), change(record, 0, query_start_loc=starts))
    assert {("C12", 0, "ubatch0.query_lens"), ("C2", 0, "ubatch0.query_start_loc")} <= found


def test_c12_rejects_the_parents_dcp_lengths(stand):
    bench, step, expected, record = stand(**WORLDS["dcp 2"])
    parent = record.ranks[0].dcp_local_seq_lens[:2]
    found = accusations((bench, step, expected), change(record, 0, dcp_local_seq_lens=parent))
    assert {("C12", 0, "ubatch0.dcp_local_seq_lens"), ("C6", 0, "ubatch0.dcp_local_seq_lens")} <= (
        found
    )


def test_c12_rejects_tokens_that_are_not_the_batchs(stand):
    bench, step, expected, record = stand()
    for name in ("input_ids", "positions"):
        values = getattr(record.ranks[0].microbatches[1], name) + 1
        found = accusations((bench, step, expected), change(record, 1, **{name: values}))
        assert {("C12", 0, name), ("C3", 0, f"ubatch1.{name}")} <= found


def test_c12_rejects_a_cut_off_the_middle(stand):
    bench, step, expected, record = stand()
    found = accusations((bench, step, expected), change(record, 1, first_token=8))
    assert ("C12", 0, "first_token") in found


def test_c12_rejects_slots_in_the_order_of_the_gathered_batch(stand):
    """One run of columns, where a microbatch has one from each rank."""
    bench, step, expected, record = stand(pcp=2)
    count = record.ranks[0].microbatches[0].slot_mappings.shape[1]
    run = record.ranks[0].slot_mappings[:, :count]
    found = accusations((bench, step, expected), change(record, 0, slot_mappings=run))
    assert {("C12", 0, "slot_mappings"), ("C4", 0, "ubatch0.slot_mappings")} <= found
    narrow = run[:, 1:]
    found = accusations((bench, step, expected), change(record, 0, slot_mappings=narrow))
    assert ("C12", 0, "slot_mappings") in found


def test_c12_rejects_the_table_rows_of_the_other_half(stand):
    bench, step, expected, record = stand()
    parts = record.ranks[0].microbatches
    table = put(parts[1].block_tables[0], slice(0, 2), parts[0].block_tables[0][:2])
    found = accusations((bench, step, expected), change(record, 1, block_tables=(table,)))
    assert found == {("C5", 0, "ubatch1.block_tables")}


@pytest.mark.parametrize("name", ["seq_lens", "slot_mappings", "positions"])
def test_c12_rejects_buffers_that_two_microbatches_share(stand, name):
    bench, step, expected, record = stand()
    parts = record.ranks[0].microbatches
    (theirs,) = [span for span in parts[0].spans if span.name == name]
    last_byte = replace(theirs, address=theirs.address + theirs.num_bytes - 1)
    spans = [last_byte if span.name == name else span for span in parts[1].spans]
    found = judge(bench, step, expected, change(record, 1, spans=tuple(spans)))
    assert {(v.contract, v.tensor) for v in found} == {("C12", f"ubatch1.{name}")}
    assert f"shares memory with ubatch0.{name}" in found[0].message


def test_c12_rejects_a_microbatch_on_the_batchs_own_buffer(stand):
    bench, step, expected, record = stand()
    spans = record.ranks[0].spans
    found = judge(bench, step, expected, change(record, 1, spans=spans[:1]))
    assert [(v.contract, v.tensor) for v in found] == [("C12", "ubatch1.query_start_loc")]
    assert "of the batch that was cut" in found[0].message


def test_c12_rejects_stale_rows_in_a_half_of_padding(kit, stand):
    bench, step, expected, record = stand(1, kit.full(8))
    part = record.ranks[0].microbatches[1]
    lens, starts = put(part.seq_lens, 1, 5), put(part.query_start_loc, slice(2, 5), 1)
    found = accusations(
        (bench, step, expected), change(record, 1, seq_lens=lens, query_start_loc=starts)
    )
    assert {("C1", 0, "ubatch1.seq_lens"), ("C2", 0, "ubatch1.query_start_loc")} <= found
    kept = replace(part, row_index=np.array([0]))
    found = accusations((bench, step, expected), change(record, 1, **vars(kept)))
    assert ("C12", 0, "ubatch1.row_index") in found


def test_c12_rejects_rows_that_are_not_padded_to_those_of_the_graph(kit, stand):
    bench, step, expected, record = stand(1, kit.full(8))
    part = record.ranks[0].microbatches[1]
    bare = {
        "num_reqs_after_padding": part.num_reqs,
        "query_start_loc": part.query_start_loc[: part.num_reqs + 1],
        "seq_lens": part.seq_lens[: part.num_reqs],
        "block_tables": tuple(table[: part.num_reqs] for table in part.block_tables),
    }
    found = judge(bench, step, expected, change(record, 1, **bare))
    assert [(v.contract, v.rank, v.tensor, v.message) for v in found] == [
        (
            "C12",
            0,
            "ubatch1.num_reqs_after_padding",
            "ubatch1.num_reqs_after_padding is 1, expected 4",
        )
    ]


@pytest.mark.parametrize("pcp", [1, 2])
def test_c12_rejects_rows_that_are_padded_where_no_graph_reads_them(stand, pcp):
    """Without FULL a half has as many rows as it holds requests, on each rank."""
    bench, step, expected, record = stand(pcp=pcp)
    part = record.ranks[-1].microbatches[0]
    padded = {
        "num_reqs_after_padding": part.num_reqs + 1,
        "query_start_loc": np.append(part.query_start_loc, part.num_tokens),
        "seq_lens": np.append(part.seq_lens, 0),
        "block_tables": tuple(np.vstack([t, np.zeros_like(t[:1])]) for t in part.block_tables),
    }
    broken = change(record, 0, rank=pcp - 1, **padded)
    found = accusations((bench, step, expected), broken)
    assert found == {("C12", pcp - 1, "ubatch0.num_reqs_after_padding")}
