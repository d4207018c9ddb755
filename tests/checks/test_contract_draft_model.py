"""C22 on passes made by hand: two ranks of a DCP group, three requests, three drafts each."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pcpbench.checks.contract_draft_model import check_draft_model, draft_graph_violations
from pcpbench.checks.draft_compare import compare_drafts
from pcpbench.checks.draft_hidden import hidden_message
from pcpbench.checks.findings import StepView
from pcpbench.checks.kv import CachePlace, KvArrays, written_slots
from pcpbench.checks.oracle_tables import TokenFeed
from pcpbench.checks.setup import ArmSetup, DraftSetup
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.records import DraftPassRecord
from pcpbench.results import CapturedGraph
from pcpbench.world import World

FULL = CUDAGraphMode.FULL
NEXT = BatchExecutionDescriptor(FULL, 4, 4, 1)
DRAFT = DraftSetup(num_steps=3, max_num_reqs=16)
SETUP = ArmSetup(
    name="eager_padded[full]",
    world=World(tp_size=2, dcp_size=2),
    descriptor_mode=CUDAGraphMode.FULL_DECODE_ONLY,
    capture_sizes=(4, 8, 64),
    draft=DRAFT,
)
# Rows of logits: four of r0 (one draft right), two of r2 (its draft right), r1's last chunk.
FED = np.array([5, 9, 7, 1, 2, 3, 4])
PROPOSED = np.array([[6, 1, 0], [8, 2, 1], [10, 3, 2]])  # of r0, r2, r1
HIDDEN = 5
# With blocks of 4 positions (2 slots a rank) and tables [1, 20], [3, 21], [2, 4]:
POSITIONS = [[5, 4, 6], [6, 5, 7]]
SLOTS = {0: [[-1, 42, 9], [41, -1, -1]], 1: [[40, -1, -1], [-1, 42, 9]]}


@pytest.fixture
def plan(kit):
    first = kit.make_plan([3, 6, 2], 1)
    shares = (kit.scheduled("r0", 3, 0, 3), kit.scheduled("r2", 2, 0, 2),
              kit.scheduled("r1", 3, 0, 6))  # fmt: skip
    zero = msgspec.structs.replace(
        first.steps[0], scheduled=shares, new_block_ids={"r0": ((1,),), "r1": ((2, 4),),
                                                         "r2": ((3,),)}
    )  # fmt: skip
    decodes = (
        drafts(kit.scheduled("r0", 4, 3, 3), 3, 1),
        drafts(kit.scheduled("r2", 2, 2, 2), 1, 1),
    )
    one = msgspec.structs.replace(
        first.steps[1],
        scheduled=(*decodes, kit.scheduled("r1", 3, 3, 6)),
        new_block_ids={"r0": ((20,),), "r2": ((21,),)},
    )
    return kit.plan_of([zero, one])


def drafts(share, count, accepted):
    return msgspec.structs.replace(share, num_draft_tokens=count, num_accepted_tokens=accepted)


def pass_of(rank, number, first, prompt):
    """A sound pass; the first has no padding, the others one row of it."""
    states = np.arange(9 * HIDDEN, dtype=np.float32).reshape(9, HIDDEN) + 100 * (number + 1)
    if number == 0:
        return replace(
            first,
            input_ids=np.array([5, 9, 0, 0, 2, 3, prompt[4], prompt[5], 4]),
            hidden_in=states - 100,
            hidden_out=states,
        )
    fed = states[[1, 5, 8]] - 100 if number == 1 else states[:3] - 100
    lengths = np.append(np.array(POSITIONS[number - 1]) + 1, 0)
    return DraftPassRecord(
        descriptor=NEXT,
        num_replays=0,
        num_reqs=3,
        num_reqs_after_padding=4,
        num_tokens=3,
        num_tokens_after_padding=4,
        input_ids=np.append(PROPOSED[:, number - 1], 0),
        positions=lengths - 1 + (lengths == 0),
        is_padding=np.array([False, False, False, True]),
        query_start_loc=np.array([0, 1, 2, 3, 3]),
        seq_lens=lengths,
        dcp_local_seq_lens=np.array([sum(p % 2 == rank for p in range(n)) for n in lengths]),
        block_tables=(np.array([[1, 20, 9], [3, 21, 9], [2, 4, 9], [0, 0, 0]]),),
        slot_mappings=np.array([[*SLOTS[rank][number - 1], -1]]),
        hidden_in=np.vstack([fed, np.zeros((1, HIDDEN), np.float32)]),
        hidden_out=states[:4],
    )


@pytest.fixture
def view(kit, plan):
    feed = TokenFeed()
    bench = kit.Bench(plan, SETUP, feed)
    for step in plan.steps:
        bench.oracle.advance(step)
        feed.advance(step)
        if step.index == 0:
            feed.take(step, ["r0", "r2"], np.array([3, 8]))
    step = plan.steps[1]
    feed.draft(step, np.array([5, 10, 7, 2]))
    expected = bench.oracle.expect(step, SETUP, kit.NONE, feed)
    record = kit.good_record(plan, step, SETUP, expected)
    logits = np.zeros((3, 3, 11), dtype=np.float32)
    np.put_along_axis(logits, PROPOSED.T[:, :, None], 1.0, axis=2)
    target = np.arange(9 * HIDDEN, dtype=np.float32).reshape(9, HIDDEN)
    record = replace(record, hidden=target, draft_logits=logits, proposed=PROPOSED)
    for rank in range(2):
        mine = record.ranks[rank]
        first = DraftPassRecord(
            descriptor=record.descriptor,
            num_replays=0,
            **{name: getattr(mine, name) for name in COMMON},
            hidden_in=target,
            hidden_out=target,
        )
        passes = tuple(pass_of(rank, n, first, kit.prompt_of(1, 6)) for n in range(3))
        record = kit.change_rank(
            record,
            rank,
            draft_passes=passes,
            proposed=PROPOSED,
            draft_rows=np.array([1, 5, 8]),
        )
    return StepView(plan=step, record=record, setup=SETUP, expected=expected, fed=FED)


COMMON = (
    "num_reqs", "num_reqs_after_padding", "num_tokens", "num_tokens_after_padding", "input_ids",
    "positions", "is_padding", "query_start_loc", "seq_lens", "dcp_local_seq_lens",
    "block_tables", "slot_mappings",
)  # fmt: skip


def messages(view):
    return [(v.rank, v.tensor, v.message) for v in check_draft_model(view)]


def test_sound_passes_break_nothing(view):
    assert messages(view) == []


def changed(view, kit, number, **changes):
    passes = list(view.record.ranks[1].draft_passes)
    passes[number] = replace(passes[number], **changes)
    record = kit.change_rank(view.record, 1, draft_passes=tuple(passes))
    return replace(view, record=record)


def with_value(array, place, value):
    out = np.array(array)
    out[place] = value
    return out


FIELDS = {
    "input_ids": (1, "draft token"),
    "positions": (1, "position"),
    "is_padding": (3, "flag"),
    "query_start_loc": (4, "padding"),
    "seq_lens": (3, "padding"),
    "dcp_local_seq_lens": (3, "padding"),
    "slot_mappings": ((0, 3), "padding"),
    "hidden_in": ((2, 0), "what the pass before made"),
}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("field", FIELDS)
def test_one_wrong_value_is_named_by_pass_tensor_and_rank(view, kit, field, number):
    found = getattr(view.record.ranks[1].draft_passes[number], field)
    place = FIELDS[field][0]
    wrong = with_value(found, place, ~found[place] if found.dtype == bool else found[place] + 1)
    (told,) = messages(changed(view, kit, number, **{field: wrong}))
    assert told[:2] == (1, f"draft.{field}")
    assert told[2].startswith(f"pass {number} (FULL[reqs=4,tokens=4]): {field}")


@pytest.mark.parametrize("field", ["input_ids", "positions", "seq_lens", "dcp_local_seq_lens"])
def test_the_first_pass_is_held_to_the_step_itself(view, kit, field):
    found = getattr(view.record.ranks[1].draft_passes[0], field)
    (told,) = messages(changed(view, kit, 0, **{field: with_value(found, 2, 9)}))
    assert told[:2] == (1, f"draft.{field}")


def test_the_first_pass_is_fed_the_targets_states(view, kit):
    states = np.array(view.record.hidden)
    (told,) = messages(changed(view, kit, 0, hidden_in=states[::-1].copy()))
    assert "hidden_in[0] is not the target model's; 8 of 9 rows differ" in told[2]


def test_real_rows_have_their_requests_blocks_and_padding_rows_none(view, kit):
    (table,) = view.record.ranks[1].draft_passes[2].block_tables
    for place in ((1, 1), (3, 2)):
        tables = (with_value(table, place, 5),)
        (told,) = messages(changed(view, kit, 2, block_tables=tables))
        assert told[1] == "draft.block_tables"
    assert messages(changed(view, kit, 2, block_tables=(with_value(table, (1, 2), 5),))) == []


def test_a_pass_runs_as_the_smallest_graph_of_its_size(view, kit):
    for wrong in (BatchExecutionDescriptor(FULL, 8, 8, 1), kit.NONE):
        told = messages(changed(view, kit, 1, descriptor=wrong))
        assert (1, "draft.descriptor") in {each[:2] for each in told}
    (told,) = messages(changed(view, kit, 0, descriptor=NEXT))
    assert told[1] == "draft.descriptor"
    (told,) = messages(changed(view, kit, 2, num_replays=1))
    assert "1 graphs were launched, not 0" in told[2]


def cut_to(one, rows, tokens):
    """The pass, staged for fewer rows and tokens than its graph has."""
    return {
        "num_reqs_after_padding": rows,
        "num_tokens_after_padding": tokens,
        "query_start_loc": one.query_start_loc[: rows + 1],
        "slot_mappings": one.slot_mappings[:, :tokens],
        **{n: getattr(one, n)[:rows] for n in ("seq_lens", "dcp_local_seq_lens")},
        **{n: getattr(one, n)[:tokens] for n in ("input_ids", "positions", "is_padding")},
        "block_tables": (one.block_tables[0][:rows],),
    }


def test_a_pass_that_runs_as_a_graph_has_the_rows_and_tokens_of_it(view, kit):
    one = view.record.ranks[1].draft_passes[1]
    for size, names in ((cut_to(one, 3, 4), ["rows"]), (cut_to(one, 3, 3), ["rows", "tokens"])):
        told = messages(changed(view, kit, 1, **size))
        full = {"rows": "num_reqs_after_padding", "tokens": "num_tokens_after_padding"}
        assert [each[1:] for each in told] == [
            (
                f"draft.{full[name]}",
                f"pass 1 (FULL[reqs=4,tokens=4]): {full[name]} is 3, expected 4",
            )
            for name in names
        ]
    fewer_rows = BatchExecutionDescriptor(FULL, 4, 3, 1)
    told = messages(changed(view, kit, 1, descriptor=fewer_rows, **cut_to(one, 3, 4)))
    assert "3 requests are to run as FULL with 4 rows and tokens" in told[0][2]


def test_the_first_pass_has_the_padding_of_the_step(view, kit):
    told = messages(changed(view, kit, 0, num_reqs_after_padding=4))
    assert [each[1] for each in told] == ["draft.num_reqs_after_padding"]


def dummy_pass(rank, descriptor, columns):
    rows, tokens = descriptor.num_reqs, descriptor.num_tokens
    lengths = np.full(rows, 1 + 2)  # two ranks, one position each in turn
    return DraftPassRecord(
        descriptor=descriptor,
        num_replays=0,
        num_reqs=rows,
        num_reqs_after_padding=rows,
        num_tokens=tokens,
        num_tokens_after_padding=tokens,
        input_ids=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int64),
        is_padding=np.ones(tokens, np.bool_),
        query_start_loc=np.arange(rows + 1),
        seq_lens=lengths,
        dcp_local_seq_lens=np.array([sum(p % 2 == rank for p in range(n)) for n in lengths]),
        block_tables=(np.zeros((rows, 6), np.int32),),
        slot_mappings=np.full((1, columns), -1),
        hidden_in=np.zeros((tokens, HIDDEN), np.float32),
        hidden_out=np.zeros((tokens, HIDDEN), np.float32),
    )


@pytest.fixture
def idle(kit, plan):
    chosen = kit.full(8)
    record = kit.idle_record(SETUP, chosen)
    for rank in range(2):
        passes = (dummy_pass(rank, chosen, 8), dummy_pass(rank, NEXT, 4))
        record = kit.change_rank(record, rank, draft_passes=passes)
    step = msgspec.structs.replace(plan.steps[0], scheduled=(), idle=True)
    return StepView(plan=step, record=record, setup=SETUP, expected=None)


def test_sound_dummy_passes_break_nothing(idle):
    assert messages(idle) == []


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("field", [*FIELDS, "block_tables"])
def test_one_wrong_value_of_a_dummy_pass_is_named(idle, kit, field, number):
    found = getattr(idle.record.ranks[1].draft_passes[number], field)
    if field == "hidden_in":
        return  # nothing reads what a dummy pass is fed
    if field == "block_tables":
        wrong = (with_value(found[0], (3, 2), 5),)
    else:
        place = (0, 3) if field == "slot_mappings" else 3
        wrong = with_value(found, place, ~found[place] if found.dtype == bool else found[place] + 1)
    (told,) = messages(changed(idle, kit, number, **{field: wrong}))
    assert told[:2] == (1, f"draft.{field}")


@pytest.mark.parametrize("number", [0, 1])
def test_a_dummy_pass_has_the_rows_and_tokens_of_its_graph(idle, kit, number):
    one = idle.record.ranks[1].draft_passes[number]
    fewer = {**cut_to(one, 3, 3), "num_reqs": 3, "num_tokens": 3}
    (told,) = messages(changed(idle, kit, number, **fewer))
    assert "3 rows and 3 tokens, expected" in told[2]
    (told,) = messages(changed(idle, kit, number, num_reqs_after_padding=3))
    assert told[1] == "draft.num_reqs_after_padding"
    (table,) = one.block_tables
    (told,) = messages(changed(idle, kit, number, block_tables=(table[:3],)))
    assert "has 3 rows, expected" in told[2]


def test_proposals_are_the_best_and_the_same_on_every_rank(view, kit):
    other = with_value(PROPOSED, (1, 2), 5)
    (told,) = messages(replace(view, record=kit.change_rank(view.record, 1, proposed=other)))
    assert told[1:] == (
        "draft.proposed",
        "draft 2 of request r2 is not the one that scores best",
    )
    record = kit.change_rank(view.record, 0, draft_rows=np.array([3, 5, 8]))
    (told,) = messages(replace(view, record=record))
    assert told[:2] == (0, "draft.draft_rows")
    record = kit.change_rank(view.record, 0, draft_passes=view.record.ranks[0].draft_passes[:2])
    (told,) = messages(replace(view, record=record))
    assert told[2] == "2 passes of the draft model, not 3"


def test_an_arm_without_a_draft_model_is_not_asked(view):
    assert messages(replace(view, setup=replace(SETUP, draft=None))) == []


def graph(label, breaks=0):
    return CapturedGraph(
        descriptor=label,
        mode="FULL",
        num_tokens=4,
        num_reqs=4,
        uniform_token_count=1,
        capture_s=0.0,
        num_ops=1,
        num_segments=1 + breaks,
        eager_breaks=breaks,
        pool_bytes_after=0,
        num_reads=0,
        num_writes=0,
    )


def test_its_graphs_are_one_a_shape_each_of_them_whole(plan):
    labels = ["draft first FULL[reqs=2,tokens=8]"]
    labels += [f"draft next FULL[reqs={n},tokens={n}]" for n in (4, 8)]

    def told(*graphs):
        setup = replace(
            SETUP,
            candidates=(BatchExecutionDescriptor(FULL, 8, 2, 4),),
            draft=replace(DRAFT, captured=graphs),
        )
        return [v.message for v in draft_graph_violations(setup, plan)]

    assert told(*map(graph, labels)) == []
    assert told(*map(graph, labels[1:])) == [f"{labels[0]} was not captured"]
    assert told(*map(graph, [*labels, "draft next FULL[reqs=64,tokens=64]"])) == [
        "draft next FULL[reqs=64,tokens=64] was captured and is no shape of a draft pass"
    ]
    assert told(graph(labels[0], 1), *map(graph, labels[1:])) == [f"{labels[0]} has 1 eager breaks"]


def test_its_caches_are_written_where_later_passes_stand_too(view):
    plain = written_slots(view.expected, 0, 0)
    place = CachePlace("draft_kv_cache", 0)
    found = set(written_slots(view.expected, 0, 0, place).tolist())
    assert found == set(plain.tolist()) | {42, 9, 41}
    assert written_slots(view.expected, 0, 0, CachePlace("kv_cache", 0)).tolist() == plain.tolist()


def test_caches_at_the_end_are_the_draft_models():
    arrays = [[np.zeros((2, 2, 2))] * 6]
    view = KvArrays(arrays, num_layers=2, num_drafts=2)
    assert [str(view.place(n)) for n in range(6)] == [
        "layer 0",
        "layer 1",
        "layer 0 index cache",
        "layer 1 index cache",
        "draft layer 0",
        "draft layer 0 index cache",
    ]
    assert [view.place(n).is_draft for n in range(6)] == [False] * 4 + [True] * 2


def outcomes(record, twin, kind, tie=False):
    found = compare_drafts(record, twin, kind, "float32", lambda *_: tie)
    return {drift.tensor: (drift.outcome, drift.num_mismatched) for drift in found}


def test_drafts_compare_up_to_the_first_that_rounding_tipped(view):
    record = view.record
    logits = np.array(record.draft_logits)
    logits[2, 0] += 3.0  # behind draft 1 of r0, which differs
    other = replace(record, draft_logits=logits, proposed=with_value(PROPOSED, (0, 1), 2))
    assert outcomes(record, record, "capture")["draft_logits"] == ("bitwise", 0)
    assert outcomes(other, record, "padding", tie=True) == {
        "draft_logits": ("bitwise", 0),
        "proposed": ("within_budget", 1),
    }
    assert outcomes(other, record, "padding")["proposed"] == ("exceeds_budget", 1)
    assert outcomes(other, record, "capture", tie=True) == {
        "draft_logits": ("exceeds_budget", 11),
        "proposed": ("exceeds_budget", 1),
    }
    assert outcomes(replace(other, proposed=PROPOSED), record, "padding")["draft_logits"][0] == (
        "exceeds_budget"
    )
    assert outcomes(replace(record, draft_logits=None), record, "capture") == {}


# Rows that several ranks have


@pytest.fixture
def copies(kit):
    """Two ranks of PCP and DCP: a prompt of 10 in uneven chunks, then one of 3 on both of them."""
    setup = kit.setup("eager", pcp=2, dcp=2, draft=DraftSetup(num_steps=1, max_num_reqs=16))
    bench = kit.Bench(kit.make_plan([10, 3], 1, block_size=16), setup)
    step, expected, record = bench.at(0)
    whole = np.random.default_rng(5).standard_normal((step.num_tokens, HIDDEN))
    record = replace(record, hidden=whole.astype(np.float32))
    return StepView(plan=step, record=record, setup=setup, expected=expected)


def fed(view, rank):
    """What a rank's first pass was fed if the model's output is the same on every rank."""
    mine = view.expected.ranks[rank]
    first = rank * mine.num_tokens_after_padding
    tokens = mine.gathered_token[first : first + mine.num_tokens]
    return tokens, view.record.hidden[tokens]


def said_of_states(view, rank, states):
    one = dummy_pass(0, NEXT, 4)
    record = view.record.ranks[rank]
    return hidden_message(view, record, 0, replace(one, hidden_in=states), None)


def test_a_copy_of_a_row_may_be_rounded_as_no_other_ranks_is(copies):
    for rank in range(2):
        tokens, states = fed(copies, rank)
        assert {10, 11, 12} <= set(tokens.tolist()) != set(range(13))
        assert said_of_states(copies, rank, states) == ""
        rounded = states * np.where(tokens >= 10, 1 + 2**-20, 1)[:, None].astype(np.float32)
        # What was restored of them is rank 0's.
        assert bool(said_of_states(copies, rank, rounded)) is (rank == 0)


def test_a_row_that_one_rank_has_is_the_target_models_bit_for_bit(copies):
    for rank in range(2):
        tokens, states = fed(copies, rank)
        own = states * np.where(tokens < 10, 1 + 2**-20, 1)[:, None].astype(np.float32)
        assert "is not the target model's" in said_of_states(copies, rank, own)


def test_a_copy_of_another_row_is_none(copies):
    tokens, states = fed(copies, 1)
    shared = np.flatnonzero(tokens >= 10)
    states[shared] = states[np.roll(shared, 1)]
    assert "3 of" in said_of_states(copies, 1, states)
