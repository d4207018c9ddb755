"""Shipped scenarios do what their `covers` says: one predicate over the steps for each id."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from pcpbench.config import DEFAULT_CAPTURE_SIZES
from pcpbench.engine.plan_steps import make_plan
from pcpbench.kv_groups import ONE_GROUP, KVGroup
from pcpbench.model.presets import TINY_SWA
from pcpbench.pcp_partition import row_grid
from pcpbench.plan import ScenarioPlan, ScheduledRequest, StepPlan
from pcpbench.scenarios.loader import load_scenario, shipped_names

NAMES = shipped_names()
ASKED_FOR = {"S1", "S2", "S3", "S4", "S7", "S8", "S11", "S12", "S13", "S14", "S16"}
WITH_DRAFTS = {"s4-draft-length-prompts": (1, 3)}
"""Scenarios that trigger what they claim under so many draft tokens only."""


WITH_GROUPS = ("s17-window-recycling",)
"""Scenarios that trigger what they claim with several KV groups only."""


def plan_of(
    name: str, dcp_size: int = 1, num_drafts: int = 0, kv_groups: tuple[KVGroup, ...] = ONE_GROUP
) -> ScenarioPlan:
    return make_plan(
        load_scenario(name),
        vocab_size=512,
        dcp_size=dcp_size,
        kv_groups=kv_groups,
        num_speculative_tokens=num_drafts,
    )


def is_decode(step: StepPlan) -> bool:
    return bool(step.scheduled) and not step.has_prefill


def decode_sizes(plan: ScenarioPlan) -> list[int]:
    return [len(step.scheduled) for step in plan.steps if is_decode(step)]


def shares(plan: ScenarioPlan, *, prefill: bool) -> list[ScheduledRequest]:
    every = [share for step in plan.steps for share in step.scheduled]
    return [share for share in every if share.is_prefilling is prefill]


def layouts_by_tokens(plan: ScenarioPlan) -> dict[int, set[tuple[tuple[int, bool], ...]]]:
    found: dict[int, set[tuple[tuple[int, bool], ...]]] = {}
    for step in plan.steps:
        layout = tuple((s.num_scheduled_tokens, s.is_prefilling) for s in step.scheduled)
        found.setdefault(step.num_tokens, set()).add(layout)
    return found


def block_owners(plan: ScenarioPlan) -> dict[int, list[str]]:
    owners: dict[int, list[str]] = {}
    for step in plan.steps:
        for req_id, groups in step.new_block_ids.items():
            for block in (block for ids in groups for block in ids):
                owners.setdefault(block, []).append(req_id)
    return owners


def shrinks(plan: ScenarioPlan) -> bool:
    return any(small < large for large, small in pairwise(decode_sizes(plan)))


def shrinks_over_reused_blocks(plan: ScenarioPlan) -> bool:
    return shrinks(plan) and any(len(set(who)) > 1 for who in block_owners(plan).values())


def s1_large_then_small_many_times(plan: ScenarioPlan) -> bool:
    return (
        sum(large >= 8 and small <= large / 4 for large, small in pairwise(decode_sizes(plan))) >= 4
    )


def s2_at_above_and_below_each_capture_size(plan: ScenarioPlan) -> bool:
    sizes = [size for size in DEFAULT_CAPTURE_SIZES if size <= plan.max_num_seqs]
    for pcp_size in (1, 2):
        seen = {-(-size // pcp_size) for size in decode_sizes(plan)}
        top = plan.max_num_seqs // pcp_size
        wanted = {near for size in sizes for near in (size - 1, size, size + 1)}
        if not {size for size in wanted if 0 < size <= top} <= seen:
            return False
    return len(sizes) >= 5


def s3_ends_idles_and_reuses(plan: ScenarioPlan) -> bool:
    freed: set[int] = set()
    held: dict[str, set[int]] = {}
    num_reuses = num_idle = 0
    for step in plan.steps[:-1]:
        num_idle += step.idle
        for req_id in step.finished_req_ids:
            freed |= held.pop(req_id)
        for req_id, groups in step.new_block_ids.items():
            held.setdefault(req_id, set()).update(*groups)
            num_reuses += bool(num_idle and freed & held[req_id])
    return num_idle >= 4 and num_reuses >= 4 and 1 in decode_sizes(plan)


def s4_short_prompts_and_last_chunks(plan: ScenarioPlan) -> bool:
    prompts, last_chunks = set(), set()
    for step in plan.steps:
        beside_decodes = any(not share.is_prefilling for share in step.scheduled)
        for share in step.scheduled:
            if share.is_prefilling and share.samples and beside_decodes:
                target = last_chunks if share.num_computed_tokens else prompts
                target.add(share.num_scheduled_tokens)
    return prompts >= {1, 2, 3, 4} and last_chunks >= {1, 2, 3, 4}


def s7_same_prompt_together_and_again(plan: ScenarioPlan) -> bool:
    admitted: dict[tuple[int, ...], list[int]] = {}
    for step in plan.steps:
        for new in step.new_requests:
            admitted.setdefault(new.prompt_token_ids, []).append(step.index)
    times = max(admitted.values(), key=len)
    return len(times) > len(set(times)) and len(set(times)) >= 3


def s8_larger_than_captured_then_decodes(plan: ScenarioPlan) -> bool:
    largest = max(DEFAULT_CAPTURE_SIZES)
    returns = 0
    for step, after in pairwise(plan.steps):
        # Under PCP 4 a rank holds a quarter of the prefill tokens; it must still be too many.
        returns += step.has_prefill and step.num_tokens >= 4 * (largest + 1) and is_decode(after)
    return returns >= 3


def s11_kv_grows_far(plan: ScenarioPlan) -> bool:
    grown = {s.req_id: s.num_computed_tokens for s in shares(plan, prefill=False)}
    decoded = {s.req_id: s.num_computed_tokens - s.prefill_len for s in shares(plan, prefill=False)}
    return max(grown.values()) >= 192 and min(decoded.values()) >= 64


def s12_other_layouts_of_equal_tokens(plan: ScenarioPlan) -> bool:
    kinds: dict[int, set[str]] = {}
    for tokens, layouts in layouts_by_tokens(plan).items():
        for layout in layouts:
            phases = {prefilling for _, prefilling in layout}
            kinds.setdefault(tokens, set()).add(str(sorted(phases)))
    return any(len(found) == 3 for found in kinds.values()) or any(
        len(layouts) >= 3 for layouts in layouts_by_tokens(plan).values()
    )


def s14_short_prefills_and_ranks_without_rows(plan: ScenarioPlan) -> bool:
    short = {s.num_scheduled_tokens for s in shares(plan, prefill=True)}
    one_decode_beside_prefill = any(
        step.has_prefill and sum(not s.is_prefilling for s in step.scheduled) == 1
        for step in plan.steps
    )
    uneven = {size for size in decode_sizes(plan) if size % 2}
    return {1, 2, 3, 5, 7, 15} <= short and one_decode_beside_prefill and {1, 3, 5} <= uneven


def decode_len(plan: ScenarioPlan) -> int:
    return max(share.num_scheduled_tokens for share in shares(plan, prefill=False))


def s4_prompts_and_last_chunks_of_decode_length(plan: ScenarioPlan) -> bool:
    length = decode_len(plan)
    found = {
        bool(share.num_computed_tokens)
        for step in plan.steps
        for share in step.scheduled
        if share.is_prefilling and share.samples and share.num_scheduled_tokens == length
        if any(not other.is_prefilling for other in step.scheduled)
    }
    return length > 1 and found == {False, True}


def prefill_among_queries_of_its_length(plan: ScenarioPlan) -> bool:
    return any(
        step.has_prefill
        and {share.num_scheduled_tokens for share in step.scheduled} == {decode_len(plan)}
        for step in plan.steps
    )


def s13_lengths_around_every_border(plan: ScenarioPlan) -> bool:
    lengths = {s.num_computed_tokens + 1 for s in shares(plan, prefill=False)}
    # Of 0 the share is: a length of 1 leaves every rank but the first without any.
    return all(
        {1, i - 1 or 1, i, i + 1, d * i - 1, d * i, d * i + 1} - {1} <= lengths
        and any(s.prompt_len == 1 for s in shares(plan, prefill=True))
        for d, i in ((2, 2), (2, 4), (4, 2), (4, 4))
    )


def rejected_and_written_again(plan: ScenarioPlan) -> bool:
    return any(s.num_rejected_tokens and s.num_accepted_tokens for s in shares(plan, prefill=False))


def s16_across_the_cut_and_halves_of_padding(plan: ScenarioPlan) -> bool:
    across = set()
    for step in plan.steps:
        place = 0
        for share in step.scheduled:
            if place < step.num_tokens // 2 < place + share.num_scheduled_tokens:
                across.add(step.has_prefill and len(step.scheduled) > 1)
            place += share.num_scheduled_tokens
    # On two ranks these are 2 + 1, 3 + 2 and 5 + 4 rows: the second rank's fill the first half of
    # the graph that covers the first's.
    return across == {True, False} and {3, 5, 9} <= set(decode_sizes(plan))


def one_token_prefill_among_ones(plan: ScenarioPlan) -> bool:
    return any(
        step.has_prefill and all(share.num_scheduled_tokens == 1 for share in step.scheduled)
        for step in plan.steps
    )


def many_one_token_prompts_beside_few_rows(plan: ScenarioPlan) -> bool:
    """PCP gives a prompt of one token to rank 0: the others then hold more padding than tokens."""
    sides = [
        (
            sum(s.is_prefilling and s.num_scheduled_tokens == 1 for s in step.scheduled),
            sum(s.num_scheduled_tokens for s in step.scheduled if not s.is_prefilling),
        )
        for step in plan.steps
    ]
    return sum(short >= 2 * max(1, decodes) for short, decodes in sides) >= 2


def odd_decode_batches(plan: ScenarioPlan) -> bool:
    return any(size % 2 for size in decode_sizes(plan))


def ragged_prefill_chunks(plan: ScenarioPlan) -> bool:
    lengths = [s.num_scheduled_tokens for s in shares(plan, prefill=True)]
    return any(n % 4 for n in lengths) and any(n % 16 and n > 16 for n in lengths)


def every_remainder_of_dcp_four(plan: ScenarioPlan) -> bool:
    lengths = {s.num_computed_tokens + 1 for s in shares(plan, prefill=False)}
    return {n % 8 for n in lengths} == set(range(8))


def empty_share_under_dcp_four(plan: ScenarioPlan) -> bool:
    return any(s.num_computed_tokens + 1 < 4 for s in shares(plan, prefill=False))


TRIGGERS: dict[str, Callable[[ScenarioPlan], bool]] = {
    "S1": s1_large_then_small_many_times,
    "S2": s2_at_above_and_below_each_capture_size,
    "S3": s3_ends_idles_and_reuses,
    "S4": s4_short_prompts_and_last_chunks,
    "S7": s7_same_prompt_together_and_again,
    "S8": s8_larger_than_captured_then_decodes,
    "S11": s11_kv_grows_far,
    "S12": s12_other_layouts_of_equal_tokens,
    "S13": s13_lengths_around_every_border,
    "S14": s14_short_prefills_and_ranks_without_rows,
    "S16": s16_across_the_cut_and_halves_of_padding,
    "K01": shrinks,
    "K02": shrinks,
    "K03": shrinks_over_reused_blocks,
    "K07": many_one_token_prompts_beside_few_rows,
    "K09": shrinks,
    "K16": s11_kv_grows_far,
    "K18": one_token_prefill_among_ones,
    "K21": odd_decode_batches,
    "K22": every_remainder_of_dcp_four,
    "K24": empty_share_under_dcp_four,
    "K25": empty_share_under_dcp_four,
    "K26": ragged_prefill_chunks,
    "K27": s16_across_the_cut_and_halves_of_padding,
    "K34": rejected_and_written_again,
}
DRAFT_TRIGGERS = TRIGGERS | {
    "S4": s4_prompts_and_last_chunks_of_decode_length,
    "K18": prefill_among_queries_of_its_length,
}


def claims() -> list[tuple[str, str]]:
    return [
        (name, cover)
        for name in NAMES
        if name not in (*WITH_DRAFTS, *WITH_GROUPS)
        for cover in load_scenario(name).covers
    ]


@pytest.mark.parametrize(("name", "cover"), claims())
@pytest.mark.parametrize("dcp_size", [1, 4])
def test_a_scenario_triggers_what_it_claims(name: str, cover: str, dcp_size: int) -> None:
    assert TRIGGERS[cover](plan_of(name, dcp_size)), f"{name} does not trigger {cover}"


@pytest.mark.parametrize(("name", "cover"), [
    (name, cover) for name in WITH_DRAFTS for cover in load_scenario(name).covers
])  # fmt: skip
@pytest.mark.parametrize("dcp_size", [1, 4])
def test_a_scenario_made_for_drafts_triggers_what_it_claims(
    name: str, cover: str, dcp_size: int
) -> None:
    found = [DRAFT_TRIGGERS[cover](plan_of(name, dcp_size, count)) for count in WITH_DRAFTS[name]]
    assert any(found) if cover == "K34" else all(found)


@pytest.mark.parametrize("dcp_size", [1, 2, 4])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("name", WITH_GROUPS)
def test_blocks_before_a_window_go_to_others_while_their_request_runs(
    name: str, dcp_size: int, num_drafts: int
) -> None:
    assert load_scenario(name).covers == ("K40",)
    plan = plan_of(name, dcp_size, num_drafts, TINY_SWA.kv_groups)
    owner: dict[int, str] = {}
    num_at_once = num_others = 0
    for step in plan.steps:
        freed = {b: name for name, g in step.freed_block_ids.items() for ids in g for b in ids}
        owner |= freed
        for req_id, groups in step.new_block_ids.items():
            for block in (block for ids in groups for block in ids):
                num_at_once += block in freed
                num_others += owner.pop(block, req_id) != req_id
    assert num_at_once >= 5
    assert num_others >= 10


def test_groups_with_windows_outgrow_the_pool_together() -> None:
    again = [
        new
        for step in plan_of("s17-window-recycling", kv_groups=TINY_SWA.kv_groups).steps
        for new in step.new_requests
        if new.num_generated
    ]
    assert len(again) >= 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dcp_size", [1, 2])
def test_every_scenario_can_be_planned_for_several_kv_groups(name: str, dcp_size: int) -> None:
    plan = plan_of(name, dcp_size, kv_groups=TINY_SWA.kv_groups)
    block_size = load_scenario(name).limits.block_size
    assert plan.block_sizes == (block_size * dcp_size, block_size)
    assert plan.sliding_windows == (0, 24)


def test_near_the_longest_length_a_decode_batch_is_not_uniform() -> None:
    plan = plan_of("s4-draft-length-prompts", num_drafts=3)
    lengths = [
        {share.num_scheduled_tokens for share in step.scheduled}
        for step in plan.steps
        if is_decode(step)
    ]
    assert any(len(found) > 1 for found in lengths)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_every_scenario_runs_with_drafts(name: str, num_drafts: int) -> None:
    plan = plan_of(name, 1, num_drafts)
    decodes = shares(plan, prefill=False)
    assert {share.num_draft_tokens for share in decodes} >= {num_drafts}
    accepted = {share.num_accepted_tokens for share in decodes}
    assert {0, num_drafts} <= accepted
    assert plan.max_num_batched_tokens >= plan.max_num_seqs * (1 + num_drafts)


def test_the_triggers_tell_scenarios_apart() -> None:
    """A predicate that everything satisfies would prove nothing."""
    for cover in sorted(ASKED_FOR):
        missing = [name for name in NAMES if not TRIGGERS[cover](plan_of(name))]
        assert missing, f"every scenario satisfies {cover}"


def test_every_sequence_asked_for_is_claimed() -> None:
    assert {cover for _, cover in claims()} >= ASKED_FOR
    assert len(NAMES) >= 12


@pytest.mark.parametrize("dcp_size", [1, 2, 4])
def test_preemption_happens_for_every_dcp_size(dcp_size: int) -> None:
    plan = plan_of("preemption", dcp_size)
    again = [new for step in plan.steps for new in step.new_requests if new.num_generated]
    assert sum(len(step.preempted_req_ids) for step in plan.steps) >= 2
    assert len(again) >= 2


@pytest.mark.parametrize("dcp_size", [1, 2, 4])
def test_in_a_full_house_one_comes_in_the_step_in_which_another_leaves(dcp_size: int) -> None:
    plan, running, replaced = plan_of("full-house", dcp_size), set[str](), 0
    for step in plan.steps:
        is_full = len(running) == plan.max_num_seqs
        replaced += bool(is_full and step.finished_req_ids and step.new_requests)
        running -= {*step.finished_req_ids, *step.preempted_req_ids}
        running |= {new.req_id for new in step.new_requests}
    assert replaced


def test_in_a_full_house_one_is_preempted_twice_with_outputs_in_between() -> None:
    resumed: dict[str, list[int]] = {}
    for step in plan_of("full-house").steps:
        for new in step.new_requests:
            if new.num_generated:
                resumed.setdefault(new.req_id, []).append(new.num_generated)
    assert any(len(set(counts)) > 1 for counts in resumed.values())


def test_prompts_are_chunked_beside_decodes() -> None:
    plan = plan_of("chunked-prefill")
    chunks: dict[str, int] = {}
    for share in shares(plan, prefill=True):
        chunks[share.req_id] = chunks.get(share.req_id, 0) + 1
    assert sorted(chunks.values())[-3:] >= [2, 3, 4]


@pytest.mark.parametrize(("dcp_size", "interleave"), [(2, 1), (2, 2), (2, 4), (4, 2), (4, 4)])
def test_prefill_contexts_end_at_every_border(dcp_size: int, interleave: int) -> None:
    d, i = dcp_size, interleave
    contexts = {s.num_computed_tokens for s in shares(plan_of("s13-prefill-context"), prefill=True)}
    wanted = {0, 1, i - 1, i, i + 1, d * i - 1, d * i, d * i + 1}
    assert wanted <= contexts
    assert i == 1 or any(0 < context <= i for context in contexts), "a rank that owns none of it"


@pytest.mark.parametrize(("dcp_size", "interleave"), [(2, 1), (2, 2), (2, 4), (4, 2), (4, 4)])
def test_a_prompt_comes_behind_unequal_shares_of_a_context(dcp_size: int, interleave: int) -> None:
    lap, found = dcp_size * interleave, 0
    for step in plan_of("s13-prefill-context").steps:
        prefills = [s for s in step.scheduled if s.num_computed_tokens < s.prefill_len]
        lengths = [s.num_computed_tokens + s.num_scheduled_tokens for s in prefills]
        if len(prefills) > 1 and prefills[0].num_computed_tokens:
            found += lengths[0] % lap != 0
    assert found == 3, "whose shares are counted decides where the second one's keys lie"


def test_dummy_steps_follow_one_decode_and_two() -> None:
    steps = plan_of("s3-idle-and-reuse").steps
    before = [a for a, b in pairwise(steps) if b.idle and not a.idle]
    # After one, all slots but the first are PAD anyway: a dummy step that resets no more passes.
    assert {len(step.scheduled) for step in before} == {1, 2}


def test_some_steps_are_large_enough_to_be_cut_together_and_on_no_rank() -> None:
    """Of two ranks: whoever counts the tokens of all cuts these, and must not (C12)."""
    found = set()
    for step in plan_of("s16-microbatch-cut").steps:
        lengths = [share.num_scheduled_tokens for share in step.scheduled]
        phases = [share.num_computed_tokens < share.prefill_len for share in step.scheduled]
        if not lengths:
            continue
        grid = row_grid(np.array(lengths), np.array(phases), 2, True, False)
        least = 4 if any(phases) else 2
        if sum(lengths) >= least > grid.tokens_per_rank().max():
            found.add(any(phases))
    assert found == {False, True}


def test_the_trace_says_where_it_is_from_and_how_it_was_scaled() -> None:
    scenario = load_scenario("azure-code")
    for word in ("AzurePublicDataset", "CC BY 4.0", "divided by 60"):
        assert word in scenario.source


def test_the_smallest_one_has_few_steps_a_shrinking_batch_and_idle_ones() -> None:
    plan = plan_of("small-steps")
    assert len(plan.steps) < 15
    assert {4, 3} <= set(decode_sizes(plan))
    assert any(not step.scheduled for step in plan.steps)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "small-steps"])
def test_a_scenario_is_small_and_mostly_decodes(name: str) -> None:
    plan = plan_of(name)
    assert 25 <= len(plan.steps) <= 80
    assert len(decode_sizes(plan)) >= 0.5 * len(plan.steps)
    usual = (5, 256, (8,)) if name == "full-house" else (16, 256, (16,))
    assert (plan.max_num_seqs, plan.max_model_len, plan.block_sizes) == usual
    if name not in ("preemption", "full-house"):
        assert not any(step.preempted_req_ids for step in plan.steps)
        assert [s.scheduled for s in plan.steps] == [s.scheduled for s in plan_of(name, 4).steps]
