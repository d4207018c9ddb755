"""Every contract: a good record, broken records it must reject, near misses it must accept."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from pcpbench.checks.contracts import CONTRACTS, check_step
from pcpbench.checks.dispatch_reasons import (
    PREFILL,
    REQUESTS,
    TOKENS,
    UNEQUAL,
    true_reasons,
)
from pcpbench.checks.dispatch_reasons import QUERY_LENGTH as LENGTH
from pcpbench.checks.findings import StepView
from pcpbench.engine.dispatcher import BatchCounts, Dispatcher, build_candidates
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.plan import StepPlan
from pcpbench.records import AddressChange, StepRecord

WORDS = (PREFILL, UNEQUAL, REQUESTS, TOKENS, LENGTH)
SIZES = {
    "one rank": {},
    "pcp 2": {"pcp": 2},
    "pcp 4": {"pcp": 4},
    "dcp 2": {"tp": 2, "dcp": 2, "interleave": 2},
    "tp 4 dcp 4": {"tp": 4, "dcp": 4, "interleave": 2},
    "pcp 2 dcp 2": {"pcp": 2, "dcp": 2},
    "pcp 2 tp 2 dcp 4": {"pcp": 2, "tp": 2, "dcp": 4},
}


def judge(bench, step, expected, record):
    view = StepView(plan=step, record=record, setup=bench.setup, expected=expected)
    return check_step(view)


def put(array, index, value):
    changed = np.array(array)
    changed[index] = value
    return changed


@pytest.fixture
def decode(kit):
    """Five decodes on two PCP ranks, padded to four rows: rank 0 holds 3 of them, rank 1 two."""

    def build(**sizes):
        sizes = sizes or {"pcp": 2}
        setup = kit.setup("full", candidates=(kit.full(4), kit.full(8)), **sizes)
        bench = kit.Bench(kit.make_plan([3, 9, 5, 2, 7], 3, block_size=16), setup)
        sharded = setup.world.shard_decode_requests
        step, expected, record = bench.at(2, kit.full(4 if sharded else 8))
        return bench, step, expected, record

    return build


@pytest.fixture
def prefill(kit):
    """Prompts of 3, 8 and 5 on two PCP ranks, nothing padded but to the common token count."""

    def build(**sizes):
        setup = kit.setup(**(sizes or {"pcp": 2}))
        bench = kit.Bench(kit.make_plan([3, 8, 5], 2, block_size=16), setup)
        return bench, *bench.at(0)

    return build


def rejects(bench, step, expected, record, contract, tensor, *words):
    found = judge(bench, step, expected, record)
    hits = [v for v in found if v.contract == contract]
    assert hits, f"{contract} let it pass; others said {found}"
    assert tensor in {v.tensor for v in hits}
    text = " ".join(v.message for v in hits)
    for word in words:
        assert word in text, text
    return hits


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    ("index", "shape"),
    [
        *((index, shape) for index in (0, 1, 3) for shape in ("NONE", "PIECEWISE")),
        (1, "FULL"),
        (3, "FULL"),
    ],
)
def test_a_good_record_is_accepted(kit, sizes, index, shape):
    chosen = {"NONE": kit.NONE, "PIECEWISE": kit.piecewise(32), "FULL": kit.full(8)}[shape]
    candidates = () if shape == "NONE" else (chosen,)
    setup = kit.setup("full", candidates=candidates, **sizes)
    bench = kit.Bench(kit.make_plan([3, 9, 5, 1, 7], 3, block_size=16), setup)
    step, expected, record = bench.at(index, chosen)
    assert judge(bench, step, expected, record) == []


def test_ids_are_unique_and_in_order():
    ids = [contract.id for contract in CONTRACTS]
    first = ["C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8"]
    assert ids == [*first, "C10", "C11", "C12", "C17", "C20", "C21", "C22"]
    assert {contract.cost for contract in CONTRACTS} <= {"quick", "full"}


def test_full_contracts_run_only_when_asked(kit, prefill):
    bench, step, expected, record = prefill()
    costly = [replace(contract, cost="full") for contract in CONTRACTS]
    broken = kit.change_rank(record, 0, seq_lens=record.ranks[0].seq_lens + 1)
    view = StepView(plan=step, record=broken, setup=bench.setup, expected=expected)
    assert check_step(view, costly) == []
    assert check_step(view, costly, "full")


# C1


def test_c1_rejects_a_stale_length_in_a_padding_row(kit, decode):
    bench, step, expected, record = decode()
    stale = put(record.ranks[1].seq_lens, 3, 17)
    hits = rejects(
        bench, step, expected, kit.change_rank(record, 1, seq_lens=stale), "C1", "seq_lens",
        "seq_lens[3] is 17, expected 0", "2 real of 4",
    )  # fmt: skip
    assert [v.rank for v in hits] == [1]


def test_c1_rejects_a_real_row_that_is_off_by_one(kit, prefill):
    bench, step, expected, record = prefill()
    wrong = put(record.ranks[0].seq_lens, 1, record.ranks[0].seq_lens[1] + 1)
    rejects(
        bench, step, expected, kit.change_rank(record, 0, seq_lens=wrong), "C1", "seq_lens",
        "seq_lens[1]", "real row",
    )  # fmt: skip


def test_c1_rejects_a_missing_row(kit, decode):
    bench, step, expected, record = decode()
    short = kit.change_rank(record, 0, seq_lens=record.ranks[0].seq_lens[:-1])
    rejects(bench, step, expected, short, "C1", "seq_lens", "3 rows")


def test_c1_accepts_a_real_row_of_zero_on_a_rank_with_nothing_to_do(kit):
    bench = kit.Bench(kit.make_plan([3], 2, block_size=16), kit.setup(pcp=2))
    step, expected, record = bench.at(1)
    assert record.ranks[1].seq_lens.tolist() == [0]
    assert judge(bench, step, expected, record) == []


# C2


@pytest.mark.parametrize(
    ("rank", "index", "value", "words"),
    [
        (1, 4, 0, "query_start_loc falls from 2 at [3] to 0 at [4]"),
        (1, 3, 3, "query_start_loc[2:][1] is 3, expected 2"),
        (0, 1, 0, "start of a real row"),
    ],
)
def test_c2_rejects(kit, decode, rank, index, value, words):
    bench, step, expected, record = decode()
    wrong = put(record.ranks[rank].query_start_loc, index, value)
    if index == 3:
        wrong[4] = 3
    broken = kit.change_rank(record, rank, query_start_loc=wrong)
    rejects(bench, step, expected, broken, "C2", "query_start_loc", words)


def test_c2_rejects_a_missing_entry(kit, decode):
    bench, step, expected, record = decode()
    wrong = record.ranks[0].query_start_loc[:-1]
    broken = kit.change_rank(record, 0, query_start_loc=wrong)
    rejects(bench, step, expected, broken, "C2", "query_start_loc", "4 entries")


def test_c2_accepts_equal_neighbours(decode):
    bench, step, expected, record = decode()
    assert record.ranks[1].query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert judge(bench, step, expected, record) == []


# C3


@pytest.mark.parametrize("name", ["input_ids", "positions"])
def test_c3_rejects_what_an_earlier_batch_left_in_the_padding(kit, decode, name):
    bench, step, expected, record = decode()
    wrong = put(getattr(record.ranks[1], name), 2, 5)
    broken = kit.change_rank(record, 1, **{name: wrong})
    rejects(bench, step, expected, broken, "C3", name, f"{name}[2] is 5, expected 0")


@pytest.mark.parametrize(("index", "value"), [(3, False), (0, True)])
def test_c3_rejects_a_wrong_flag(kit, decode, index, value):
    bench, step, expected, record = decode()
    broken = kit.change_rank(record, 0, is_padding=put(record.ranks[0].is_padding, index, value))
    rejects(bench, step, expected, broken, "C3", "is_padding", f"is_padding[{index}]")


@pytest.mark.parametrize("name", ["input_ids", "positions"])
def test_c3_rejects_a_wrong_real_token(kit, prefill, name):
    bench, step, expected, record = prefill()
    values = getattr(record.ranks[1], name)
    broken = kit.change_rank(record, 1, **{name: put(values, 0, values[0] + 1)})
    rejects(bench, step, expected, broken, "C3", name, "real token")


def test_c3_rejects_a_decode_fed_with_another_token_than_was_sampled(kit, decode):
    bench, step, expected, record = decode()
    assert expected.ranks[0].input_ids[1] == 3  # request 2, second token, see Bench.at
    broken = kit.change_rank(record, 0, input_ids=put(record.ranks[0].input_ids, 1, 4))
    rejects(bench, step, expected, broken, "C3", "input_ids", "is 4, expected 3")


def test_c3_accepts_any_token_where_nobody_can_know_it(kit):
    setup = kit.setup()
    bench = kit.Bench(kit.make_plan([3], 3, block_size=16), setup)
    bench.oracle.advance(bench.plan.steps[0])
    step = bench.plan.steps[1]
    bench.oracle.advance(step)
    expected = bench.oracle.expect(step, setup, kit.NONE, bench.feed)
    record = kit.good_record(bench.plan, step, setup, expected)
    unknown = kit.change_rank(record, 0, input_ids=np.array([9]))
    assert judge(bench, step, expected, unknown) == []


# C4


def test_c4_rejects_a_slot_left_in_the_padded_tail(kit, decode):
    bench, step, expected, record = decode()
    broken = kit.change_rank(
        record, 1, slot_mappings=put(record.ranks[1].slot_mappings, (0, 6), 35)
    )
    hits = rejects(
        bench, step, expected, broken, "C4", "slot_mappings",
        "slot_mappings[0, 6] is 35, expected -1", "padding token",
    )  # fmt: skip
    assert [v.rank for v in hits] == [1]


@pytest.mark.parametrize("sizes", [{"pcp": 2}, {"tp": 2, "dcp": 2}, {"pcp": 2, "dcp": 2}])
def test_c4_rejects_a_real_token_at_a_neighbouring_slot(kit, prefill, sizes):
    bench, step, expected, record = prefill(**sizes)
    slots = record.ranks[0].slot_mappings
    place = int(np.flatnonzero(slots[0] >= 0)[-1])
    broken = kit.change_rank(record, 0, slot_mappings=put(slots, (0, place), slots[0, place] + 1))
    rejects(bench, step, expected, broken, "C4", "slot_mappings", "slot of a real token")


def test_c4_rejects_a_token_written_by_a_rank_that_does_not_own_it(kit, prefill):
    bench, step, expected, record = prefill(tp=2, dcp=2)
    everything = record.ranks[1].slot_mappings
    both = np.where(everything < 0, record.ranks[0].slot_mappings, everything)
    broken = kit.change_rank(record, 1, slot_mappings=both)
    rejects(bench, step, expected, broken, "C4", "slot_mappings", "expected -1")


def test_c4_rejects_two_writers_of_a_replicated_token(kit, decode):
    bench, step, expected, record = decode(pcp=2, dcp=2)
    slots = record.ranks[0].slot_mappings
    twice = np.concatenate([slots[:, :8], slots[:, :8]], axis=1)
    broken = kit.change_rank(record, 0, slot_mappings=twice)
    rejects(bench, step, expected, broken, "C4", "slot_mappings", "PCP rank 1")


def test_c4_rejects_a_slot_in_an_idle_step(kit):
    setup = kit.setup()
    clean = kit.idle_record(setup, kit.full(3), num_columns=3)
    view = StepView(plan=idle_step(), record=clean, setup=setup, expected=None)
    assert check_step(view) == []
    record = kit.change_rank(clean, 0, slot_mappings=np.array([[-1, 3, -1]]))
    assert [v.contract for v in check_step(replace(view, record=record))] == ["C4"]


def idle_step():
    return StepPlan(index=4, scheduled=(), idle=True)


# C5


def test_c5_rejects_blocks_that_a_larger_batch_left_in_a_padding_row(kit, decode):
    bench, step, expected, record = decode()
    table = put(record.ranks[1].block_tables[0], (2, 1), 6)
    broken = kit.change_rank(record, 1, block_tables=(table,))
    rejects(bench, step, expected, broken, "C5", "block_tables", "block_tables[0][2, 1] is 6")


def test_c5_rejects_another_requests_blocks(kit, decode):
    bench, step, expected, record = decode()
    table = record.ranks[0].block_tables[0][[1, 0, 2, 3]]
    broken = kit.change_rank(record, 0, block_tables=(table,))
    rejects(bench, step, expected, broken, "C5", "block_tables", "blocks of request r0")


def test_c5_rejects_too_few_columns_and_too_few_groups(kit, decode):
    bench, step, expected, record = decode()
    for tables in ((record.ranks[0].block_tables[0][:, :0],), ()):
        broken = kit.change_rank(record, 0, block_tables=tables)
        rejects(bench, step, expected, broken, "C5", "block_tables")


def test_c5_accepts_anything_past_a_rows_last_block(kit, prefill):
    bench, step, expected, record = prefill()
    table = put(record.ranks[0].block_tables[0], (0, 23), -12345)
    assert judge(bench, step, expected, kit.change_rank(record, 0, block_tables=(table,))) == []


# C6


@pytest.mark.parametrize("sizes", [{"tp": 2, "dcp": 2, "interleave": 2}, {"pcp": 2, "dcp": 2}])
@pytest.mark.parametrize("row", [1, 7])
def test_c6_rejects_a_wrong_share_and_a_stale_padding_row(kit, decode, sizes, row):
    bench, step, expected, record = decode(**sizes)
    local = record.ranks[1].dcp_local_seq_lens
    broken = kit.change_rank(record, 1, dcp_local_seq_lens=put(local, row, local[row] + 1))
    rejects(bench, step, expected, broken, "C6", "dcp_local_seq_lens")


def test_c6_rejects_lengths_computed_from_another_batch(kit, decode):
    """Each rank's shares fit each other, but not the seq_lens that the batch holds."""
    bench, step, expected, record = decode(tp=2, dcp=2)
    shares = [record.ranks[r].dcp_local_seq_lens for r in (0, 1)]
    for rank in (0, 1):
        record = kit.change_rank(
            record, rank, dcp_local_seq_lens=shares[rank][[1, 0, 2, 3, 4, 5, 6, 7]]
        )
    rejects(bench, step, expected, record, "C6", "dcp_local_seq_lens", "share of seq_lens")


def test_c6_rejects_missing_and_uncalled_for_lengths(kit, decode):
    bench, step, expected, record = decode(tp=2, dcp=2)
    broken = kit.change_rank(record, 0, dcp_local_seq_lens=None)
    rejects(bench, step, expected, broken, "C6", "dcp_local_seq_lens", "missing")
    bench, step, expected, record = decode(pcp=2)
    broken = kit.change_rank(record, 0, dcp_local_seq_lens=np.zeros(4))
    rejects(bench, step, expected, broken, "C6", "dcp_local_seq_lens", "present")


def test_c6_rejects_ranks_whose_shares_do_not_add_up(kit, decode):
    """Rank 1 cut its shares from lengths of its own, so each rank is at peace with itself."""
    bench, step, expected, record = decode(tp=2, dcp=2)
    longer = record.ranks[1].seq_lens + 2 * (record.ranks[1].seq_lens > 0)
    local = record.ranks[1].dcp_local_seq_lens + (record.ranks[1].seq_lens > 0)
    broken = kit.change_rank(record, 1, seq_lens=longer, dcp_local_seq_lens=local)
    rejects(bench, step, expected, broken, "C6", "dcp_local_seq_lens", "add up to")


def test_c6_does_not_sum_over_rows_that_the_ranks_do_not_share(prefill):
    bench, step, expected, record = prefill(pcp=2, dcp=2)
    assert any(not row.replicated for row in expected.ranks[0].rows)
    assert judge(bench, step, expected, record) == []


# C7


def test_c7_rejects_wrong_counts(kit, decode):
    bench, step, expected, record = decode()
    for name in ("num_reqs", "num_tokens", "num_reqs_after_padding", "num_tokens_after_padding"):
        value = getattr(record.ranks[0], name) + 1
        broken = kit.change_rank(record, 0, **{name: value})
        rejects(bench, step, expected, broken, "C7", name, f"{name} is {value}")


def test_c7_rejects_rows_in_another_order(kit, decode):
    bench, step, expected, record = decode()
    broken = kit.change_rank(record, 0, row_req_index=np.array([2, 0, 4]))
    rejects(
        bench, step, expected, broken, "C7", "rows",
        "row 0 is tokens [0:1] of request r2, expected tokens [0:1] of request r0",
    )  # fmt: skip


def test_c7_rejects_a_token_that_no_rank_holds(kit, prefill):
    bench, step, expected, record = prefill()
    starts = record.ranks[1].row_start
    broken = kit.change_rank(record, 1, row_start=put(starts, 1, starts[1] + 1))
    rejects(
        bench, step, expected, broken, "C7", "rows",
        "token 2 of request r0 is on no rank of [0, 1]; 1 of 3 are missing",
    )  # fmt: skip


def test_c7_rejects_a_restore_index_off_by_one(kit, prefill):
    bench, step, expected, record = prefill()
    index = record.ranks[0].hidden_restore_idx
    broken = kit.change_rank(record, 0, hidden_restore_idx=put(index, 3, index[3] + 1))
    rejects(bench, step, expected, broken, "C7", "hidden_restore_idx", "hidden_restore_idx[3]")
    outside = kit.change_rank(record, 0, hidden_restore_idx=put(index, 3, 9999))
    rejects(bench, step, expected, outside, "C7", "hidden_restore_idx", "outside")


def test_c7_rejects_a_restore_from_padding(kit, decode):
    bench, step, expected, record = decode()
    index = record.ranks[0].hidden_restore_idx
    broken = kit.change_rank(record, 0, hidden_restore_idx=put(index, 1, 7))
    rejects(bench, step, expected, broken, "C7", "hidden_restore_idx", "holds padding")


def test_c7_accepts_a_restore_from_any_copy_of_a_replicated_token(kit, decode):
    bench, step, expected, record = decode(pcp=2, dcp=2)
    other = record.ranks[0].hidden_restore_idx + record.ranks[0].num_tokens_after_padding
    assert judge(bench, step, expected, kit.change_rank(record, 0, hidden_restore_idx=other)) == []


def test_c7_rejects_two_writers_none_and_padding_as_a_writer(kit, decode):
    bench, step, expected, record = decode(pcp=2, dcp=2)
    mask = record.ranks[0].gathered_kv_write_mask
    for index, value, words in (
        (9, True, "token 1 has 2 KV writers"),
        (1, False, "token 1 has 0 KV writers"),
        (6, True, "lets padding write"),
    ):
        broken = kit.change_rank(record, 0, gathered_kv_write_mask=put(mask, index, value))
        rejects(bench, step, expected, broken, "C7", "gathered_kv_write_mask", words)


def test_c7_rejects_another_writer_than_rank_zero(kit, decode):
    bench, step, expected, record = decode(pcp=2, dcp=2)
    mask = np.roll(record.ranks[0].gathered_kv_write_mask, 8)
    broken = kit.change_rank(record, 0, gathered_kv_write_mask=mask)
    rejects(bench, step, expected, broken, "C7", "gathered_kv_write_mask", "the writer")


@pytest.mark.parametrize("name", ["hidden_restore_idx", "gathered_kv_write_mask"])
def test_c7_rejects_missing_and_uncalled_for_indices(kit, decode, prefill, name):
    bench, step, expected, record = decode()
    broken = kit.change_rank(record, 0, **{name: None})
    rejects(bench, step, expected, broken, "C7", name, "missing")
    bench, step, expected, record = prefill(tp=2)
    broken = kit.change_rank(record, 0, **{name: np.zeros(17, bool)})
    rejects(bench, step, expected, broken, "C7", name, "without PCP")


# C8


@pytest.mark.parametrize(("now", "words"), [(0x2000, "is at 0x2000"), (None, "is gone")])
def test_c8_names_a_moved_buffer(decode, now, words):
    bench, step, expected, record = decode()
    change = AddressChange(
        graph="FULL[reqs=4,tokens=4]",
        name="rank1.seq_lens",
        captured_address=0x1000,
        current_address=now,
        op="aten.index_select",
    )
    broken = replace(record, address_changes=(change,))
    rejects(bench, step, expected, broken, "C8", "rank1.seq_lens", words, "0x1000", "index_select")


# C10


def test_c10_rejects_ranks_that_choose_differently(kit, decode):
    bench, step, expected, record = decode()
    broken = kit.change_rank(record, 1, descriptor=kit.full(8))
    hits = rejects(bench, step, expected, broken, "C10", "descriptor", "rank 1 chose")
    assert "FULL[reqs=8,tokens=8] for 3 rows and 3 tokens, step ran" in hits[0].message
    assert [v.rank for v in hits] == [1]


@pytest.mark.parametrize("name", ["dispatch_num_reqs", "dispatch_num_tokens"])
def test_c10_rejects_counts_of_one_rank(kit, decode, name):
    bench, step, expected, record = decode()
    broken = kit.change_rank(record, 1, **{name: 2})
    rejects(bench, step, expected, broken, "C10", name, "is 2, expected 3")


def at(kit, index, chosen, candidates, reason="", prompts=(3, 9, 5, 2, 7), **more):
    setup = kit.setup("full", pcp=2, candidates=candidates, **more)
    bench = kit.Bench(kit.make_plan(list(prompts), 3, block_size=16), setup)
    step, expected, record = bench.at(index, chosen, reason)
    return [v.message for v in judge(bench, step, expected, record) if v.contract == "C10"]


def test_c10_rejects_a_larger_graph_than_needed(kit):
    (message,) = at(kit, 1, kit.full(8), (kit.full(4), kit.full(8)))
    assert "FULL[reqs=4,tokens=4] is the smallest that covers 3 rows and 3 tokens" in message


def test_c10_rejects_eager_where_a_graph_would_do(kit):
    (message,) = at(kit, 1, kit.NONE, (kit.full(4),), LENGTH)
    assert "ran as NONE although FULL[reqs=4,tokens=4]" in message


def test_c10_rejects_piecewise_where_full_would_do(kit):
    found = at(kit, 1, kit.piecewise(4), (kit.piecewise(4), kit.full(4)), LENGTH)
    assert "FULL[reqs=4,tokens=4] is the smallest" in found[0]


def test_c10_rejects_a_miss_without_reason_and_a_reason_without_miss(kit):
    assert "no reason" in at(kit, 1, kit.NONE, (kit.full(2),))[0]
    assert at(kit, 1, kit.NONE, (kit.full(2),), "more requests than the largest FULL graph") == []
    assert "yet gives a reason" in at(kit, 1, kit.full(4), (kit.full(4),), "none")[0]


VARLEN = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8, max_query_len=2)


def test_c10_rejects_a_reason_that_does_not_hold(kit):
    """Step 0 prefills; steps 1 and 2 decode 5 requests, 3 of them on rank 0."""
    few, pairs = (kit.full(2),), (kit.full(4, 2),)
    for index, candidates, reasons in (
        (0, few, [PREFILL, REQUESTS, TOKENS]),
        (1, few, [REQUESTS, TOKENS]),
        (1, pairs, [LENGTH]),
    ):
        for reason in (*WORDS, "just so"):
            found = at(kit, index, kit.NONE, candidates, reason)
            assert bool(found) is (reason not in reasons), (index, candidates, reason)
    (message,) = at(kit, 1, kit.NONE, few, PREFILL)
    assert message == (
        f'the step ran as {kit.NONE.label}, "{PREFILL}" is not why: "{REQUESTS}" and "{TOKENS}" is'
    )


def test_reasons_that_hold_for_decodes_of_other_lengths(kit):
    whole = Expected(False, None, 3, 5)
    assert list(true_reasons((kit.full(4, 2),), whole, 3)) == [UNEQUAL]
    assert list(true_reasons((kit.full(4, 2), VARLEN), whole, 3)) == [LENGTH]
    assert list(true_reasons((kit.full(2, 2), kit.piecewise(64)), whole, 3)) == [
        UNEQUAL, REQUESTS, TOKENS,
    ]  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """What reasons hang on."""

    has_prefill: bool
    uniform_token_count: int | None
    dispatch_num_reqs: int
    dispatch_num_tokens: int
    max_query_len: int = 4


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("draft_len", [1, 2, 4])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (4, 7), (3,), (5, 6, 64)])
def test_the_engines_reason_holds_for_every_batch(mode, draft_len, dynamic, sizes):
    """Whatever is dispatched, and in the words that the judge knows."""
    candidates = build_candidates(
        CUDAGraphMode[mode],
        sizes,
        decode_query_len=draft_len,
        max_num_seqs=6,
        max_num_tokens=32,
        dynamic_drafts=dynamic,
    ).descriptors
    if not any(d.cg_mode is CUDAGraphMode.FULL for d in candidates):
        return
    dispatcher = Dispatcher(CUDAGraphMode[mode], candidates)
    num_missed = 0
    for num_reqs in range(1, 9):
        for num_tokens in range(num_reqs, num_reqs * draft_len + 1):
            for has_prefill in (False, True):
                even = num_tokens % num_reqs == 0 and not has_prefill
                uniform = num_tokens // num_reqs if even else None
                decision = dispatcher.decide(
                    BatchCounts(num_reqs, num_tokens, uniform, has_prefill, draft_len)
                )
                if decision.miss_reason:
                    whole = Expected(has_prefill, uniform, num_reqs, num_tokens)
                    holding = list(true_reasons(candidates, whole, num_reqs))
                    assert decision.miss_reason in holding, (num_reqs, num_tokens, has_prefill)
                    num_missed += 1
    assert num_missed


def test_c10_rejects_full_for_a_prefill_and_for_a_descriptor_never_captured(kit):
    prefill = at(kit, 0, kit.full(32), (kit.full(32),))
    assert "cannot serve this step: a prefill" in prefill[0]
    assert "not among the 1 captured" in at(kit, 1, kit.full(4), (kit.full(8),))[0]


def test_c10_rejects_full_for_a_prompt_of_one_token(kit):
    """K18: the shape of a decode, the phase of a prefill."""
    found = at(kit, 0, kit.full(2), (kit.full(2),), prompts=(1, 1))
    assert "a prefill" in found[0]


def test_c10_rejects_a_graph_too_small_for_the_largest_rank(kit):
    found = at(kit, 1, kit.full(2), (kit.full(2),))
    assert "cannot serve this step: 3 rows and 3 tokens" in found[0]


def test_c10_accepts_what_fits_exactly_and_eager_without_candidates(kit):
    assert at(kit, 1, kit.full(3), (kit.full(3), kit.full(4))) == []
    assert at(kit, 1, kit.NONE, ()) == []
    assert at(kit, 0, kit.piecewise(16), (kit.piecewise(16), kit.full(8)), PREFILL) == []
    assert at(kit, 1, kit.piecewise(4), (kit.piecewise(4),)) == []


def test_c10_wants_no_reason_of_a_padded_twin(kit):
    assert at(kit, 1, kit.NONE, (kit.full(2),), padded_like="full") == []


def test_c10_knows_varlen_and_multi_token_graphs(kit):
    for longest in (1, 2):
        varlen = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 4, max_query_len=longest)
        assert at(kit, 1, varlen, (varlen,)) == []
    none = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 4, max_query_len=0)
    assert "cannot serve" in at(kit, 1, none, (none,))[0]
    two_each = kit.full(4, query_len=2)
    assert at(kit, 1, kit.NONE, (two_each,), "no FULL graph with this query length") == []


# C11

CALL = ("all_gather", (0, 1), (4, 8), "torch.float32")


def with_logs(record, *logs):
    ranks = tuple(
        replace(rank, collectives=tuple(log)) for rank, log in zip(record.ranks, logs, strict=True)
    )
    return replace(record, ranks=ranks)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([CALL], "which issued 2 of them"),
        ([CALL, ("all_gather", (0, 1), (3, 8), "torch.float32")], "all_gather [3, 8]"),
        ([CALL, ("all_reduce", (0, 1), (4, 8), "torch.float32")], "all_reduce"),
        ([CALL, ("all_gather", (0, 1), (4, 8), "torch.bfloat16")], "bfloat16"),
    ],
)
def test_c11_rejects_another_sequence(decode, theirs, words):
    bench, step, expected, record = decode()
    broken = with_logs(record, [CALL, CALL], theirs)
    rejects(bench, step, expected, broken, "C11", "collectives", words)


def test_c11_rejects_a_call_over_a_group_without_the_caller(decode):
    bench, step, expected, record = decode()
    broken = with_logs(record, [CALL], [CALL, ("all_gather", (0, 2), (4, 8), "torch.float32")])
    rejects(bench, step, expected, broken, "C11", "collectives", "lack this rank")


def test_c11_rejects_two_groups_met_in_another_order(decode):
    bench, step, expected, record = decode(pcp=2, tp=2)
    small = ("all_reduce", (0, 1), (4, 8), "torch.float32")
    large = ("all_reduce", (0, 1, 2, 3), (4, 8), "torch.float32")
    broken = with_logs(record, [small, large], [large, small], [large], [large])
    rejects(bench, step, expected, broken, "C11", "collectives", "shared collective 0")


def test_c11_accepts_groups_of_their_own(decode):
    bench, step, expected, record = decode(pcp=2, tp=2)

    def call(*ranks):
        return ("all_reduce", ranks, (4, 8), "torch.float32")

    logs = [
        [call(0, 1), call(0, 2)], [call(0, 1), call(1, 3), call(1, 3)],
        [call(0, 2), call(2, 3)], [call(1, 3), call(2, 3), call(1, 3)],
    ]  # fmt: skip
    assert judge(bench, step, expected, with_logs(record, *logs)) == []


def test_a_record_of_the_wrong_shapes_is_reported_and_does_not_raise(kit, decode):
    bench, step, expected, record = decode()
    empty = np.zeros(0, dtype=np.int64)
    names = ("input_ids", "positions", "is_padding", "query_start_loc", "seq_lens", "row_start")
    for name in names:
        assert judge(bench, step, expected, kit.change_rank(record, 0, **{name: empty}))
    nothing = kit.change_rank(record, 0, slot_mappings=empty, block_tables=(empty,))
    assert isinstance(nothing, StepRecord)
    assert {v.contract for v in judge(bench, step, expected, nothing)} == {"C4", "C5"}


def test_sampling_is_from_the_last_token_of_each_request_that_is_due(prefill, kit):
    """Prompts of 3, 8 and 5 end at rows 2, 10 and 15; first tokens lie at 0, 3 and 11."""
    bench, step, expected, record = prefill()
    right = kit.change_rank(record, 1, sampled_rows=np.array([2, 10, 15]))
    assert judge(bench, step, expected, right) == []
    for wrong in ([0, 3, 11], [2, 10, 14], [2, 10]):
        broken = kit.change_rank(record, 1, sampled_rows=np.array(wrong))
        found = [(v.contract, v.rank, v.tensor) for v in judge(bench, step, expected, broken)]
        assert found == [("C7", 1, "sampled_rows")]


def test_what_is_sampled_is_the_best_token_or_one_that_ties_with_it(prefill):
    bench, step, expected, record = prefill()
    best, other = record.sampled[1], (record.sampled[1] + 1) % record.logits.shape[1]
    tie = replace(record, logits=put(record.logits, (1, other), record.logits[1, best]))
    assert judge(bench, step, expected, tie) == []
    better = replace(record, logits=put(record.logits, (1, other), 10.0))
    found = [(v.contract, v.tensor) for v in judge(bench, step, expected, better)]
    assert found == [("C7", "sampled")]


@pytest.mark.parametrize("token", [-1, 11, 1 << 40])
def test_a_token_outside_the_vocabulary_is_named_and_the_others_are_compared(prefill, token):
    bench, step, expected, record = prefill()
    wrong = replace(record, sampled=put(record.sampled, 1, token))
    found = [(v.contract, v.rank, v.message) for v in judge(bench, step, expected, wrong)]
    outside = f"token {token} was sampled at 1, outside the vocabulary of 11"
    assert found == [("C7", None, outside)]
    other = (record.sampled[2] + 1) % 11
    both = replace(wrong, sampled=put(wrong.sampled, 2, other))
    told = [v.message for v in judge(bench, step, expected, both)]
    assert told == [outside, f"token {other} was sampled at 2, and its logit is not the best"]


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(
    ("change", "seen"),
    [(lambda ranks: ranks[:1], [0]), (lambda ranks: (*ranks, ranks[1]), [0, 1, 1])],
    ids=["one is missing", "one is there twice"],
)
def test_every_rank_of_the_world_left_a_record(kit, prefill, change, seen, idle):
    bench, step, expected, record = prefill()
    if idle:
        record, expected = kit.idle_record(bench.setup, kit.NONE), None
    broken = replace(record, ranks=change(record.ranks))
    found = [(v.contract, v.rank, v.tensor, v.message)
             for v in judge(bench, step, expected, broken)]  # fmt: skip
    message = f"ranks {seen} left a record of the step, expected all 2 of the world"
    assert found == [("C7", None, "ranks", message)]


@pytest.mark.parametrize("place", [None, 0, 2, 3, 5])
def test_flags_of_all_pcp_ranks_tokens_are_compared_rank_by_rank(kit, place):
    """Five decodes on two ranks, three tokens each after padding: [0 0 0 | 0 0 1]."""
    bench = kit.Bench(kit.make_plan([3, 9, 5, 2, 7], 1, block_size=16), kit.setup("eager", pcp=2))
    step, expected, record = bench.at(1)
    flags = np.array([False] * 5 + [True])
    if place is not None:
        flags[place] = ~flags[place]
    record = kit.change_rank(record, 0, gathered_is_padding=flags)
    view = StepView(plan=step, record=record, setup=bench.setup, expected=expected)
    told = [(v.contract, v.rank, v.tensor) for v in check_step(view)]
    assert told == ([] if place is None else [("C3", 0, "gathered_is_padding")])
