"""The partition over 1 to 8 ranks, with and without DCP, on batches that hypothesis thinks of.

Every expectation is written out here in plain Python, one token at a time. PCPBENCH_EXAMPLES=5000
runs as many new examples of each property instead of the same 120.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pcpbench.dcp import maybe_prepare_dcp_local_seq_lens
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode

requests = st.lists(
    st.tuples(
        st.booleans(),
        st.sampled_from([0, 1, 1, 1, 2, 3, 5, 7, 8, 11, 16, 17, 23]),
        st.integers(0, 40),
    ),
    min_size=1,
    max_size=12,
)


@dataclass(frozen=True)
class Case:
    """One step: pcp, dcp, interleave, what is padded, and (prefills, tokens, computed) a row."""

    pcp: int
    dcp: int
    interleave: int
    mode: CUDAGraphMode
    spare_rows: int
    spare_tokens: int
    rows: list[tuple[bool, int, int]]

    @property
    def lens(self) -> list[int]:
        return [tokens for _, tokens, _ in self.rows]

    @property
    def prefilling(self) -> list[bool]:
        return [prefills for prefills, _, _ in self.rows]

    @property
    def computed(self) -> list[int]:
        return [computed for _, _, computed in self.rows]


@st.composite
def cases(draw):
    pcp = draw(st.integers(1, 8))
    dcp = draw(st.sampled_from([1, pcp]))
    rows = draw(requests)
    modes = [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE]
    if draw(st.booleans()):
        rows = [(False, tokens, computed) for _, tokens, computed in rows]
        modes = [CUDAGraphMode.FULL]
    return Case(
        pcp=pcp,
        dcp=dcp,
        interleave=draw(st.sampled_from([1, 2, 4])),
        mode=draw(st.sampled_from(modes)),
        spare_rows=draw(st.integers(0, 3)),
        spare_tokens=draw(st.integers(0, 3)),
        rows=rows,
    )


def chunks(tokens: int, pcp: int) -> list[range]:
    """2 x pcp runs of ceil(tokens / (2 x pcp)) token numbers, as many as there are tokens for."""
    size = math.ceil(tokens / (2 * pcp))
    return [range(min(k * size, tokens), min((k + 1) * size, tokens)) for k in range(2 * pcp)]


Row = tuple[int, list[int], bool]


def expected_rows(case: Case) -> list[list[Row]]:
    """(request, token numbers within it, whether every rank holds them) of each rank's rows."""
    ranks: list[list[Row]] = [[] for _ in range(case.pcp)]
    decodes = [r for r, (prefills, n, _) in enumerate(case.rows) if n and not prefills]
    prefills = [r for r, (prefills, n, _) in enumerate(case.rows) if n and prefills]
    for ordinal, request in enumerate(decodes):
        held = list(range(case.lens[request]))
        if case.pcp > 1 and case.dcp == 1:
            ranks[ordinal % case.pcp].append((request, held, False))
            continue
        for rank in ranks:
            rank.append((request, held, True))
    for request in prefills:
        cut = chunks(case.lens[request], case.pcp)
        whole = case.dcp > 1 and len(cut[-1]) == 0
        for number, rank in enumerate(ranks):
            parts = [range(case.lens[request])] if whole else [cut[number], cut[-1 - number]]
            rank.extend((request, list(part), whole) for part in parts if len(part))
    return ranks


def describe(case: Case) -> BatchExecutionDescriptor:
    ranks = expected_rows(case)
    tokens = max(sum(len(held) for _, held, _ in rank) for rank in ranks) + case.spare_tokens
    rows = max(1, *(len(rank) for rank in ranks)) + case.spare_rows
    return BatchExecutionDescriptor(
        case.mode, tokens, rows if case.mode is CUDAGraphMode.FULL else None
    )


# The same examples on every run: a check that others rely on must not depend on luck.
run = settings(
    max_examples=int(os.environ.get("PCPBENCH_EXAMPLES", "120")),
    derandomize="PCPBENCH_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def partitioned(pcp_stand):
    """Partition a case on every rank, over dirty buffers: (stand, global batch, local batches)."""
    stands = {}

    def partition(case: Case):
        key = (case.pcp, case.dcp, case.interleave)
        if key not in stands:
            stands[key] = pcp_stand(*key)
        stand = stands[key]
        stand.soil()
        batch = stand.batch(case.lens, case.prefilling, case.computed)
        descriptor = describe(case)
        return (
            stand,
            batch,
            [manager.partition_batch(batch, descriptor) for manager in stand.managers],
        )

    return partition


@run
@given(case=cases())
def test_every_rank_holds_its_rows_and_neutral_padding(partitioned, case):
    _, batch, locals_ = partitioned(case)
    descriptor = describe(case)
    starts = [sum(case.lens[:row]) for row in range(len(case.rows))]
    for local, rows in zip(locals_, expected_rows(case), strict=True):
        num_tokens = sum(len(held) for _, held, _ in rows)
        assert local.num_tokens == num_tokens
        assert local.num_reqs == max(1, len(rows))
        padded_rows = descriptor.num_reqs or local.num_reqs
        assert local.num_reqs_after_padding == padded_rows
        if case.mode is not CUDAGraphMode.NONE:
            assert local.num_tokens_after_padding == descriptor.num_tokens
        padding = local.num_tokens_after_padding - num_tokens
        places = [starts[request] + k for request, held, _ in rows for k in held]
        assert local.input_ids.tolist() == [1000 + t for t in places] + [0] * padding
        positions = [case.computed[request] + k for request, held, _ in rows for k in held]
        assert local.positions.tolist() == positions + [0] * padding
        assert local.is_padding.tolist() == [False] * num_tokens + [True] * padding
        ends, lens = [0], []
        for request, held, _ in rows:
            ends.append(ends[-1] + len(held))
            lens.append(case.computed[request] + held[-1] + 1)
        ends += [num_tokens] * (padded_rows + 1 - len(ends))
        lens += [0] * (padded_rows - len(lens))
        assert local.query_start_loc.tolist() == local.query_start_loc_np.tolist() == ends
        assert local.seq_lens.tolist() == local.seq_lens_cpu_upper_bound.tolist() == lens
        if rows:
            assert local.req_ids == [f"r{request}" for request, _, _ in rows]
    assert batch.num_tokens == sum(case.lens)


@run
@given(case=cases())
def test_cover_restore_and_one_writer(partitioned, case):
    stand, batch, locals_ = partitioned(case)
    lengths = {local.num_tokens_after_padding for local in locals_}
    assert len(lengths) == 1
    gathered = torch.cat([local.input_ids for local in locals_])
    held = torch.cat([local.is_padding for local in locals_]).logical_not()
    tokens = list(range(1000, 1000 + batch.num_tokens))
    assert sorted(set(gathered[held].tolist())) == tokens
    first = stand.managers[0]
    for manager in stand.managers:
        assert manager.restore_hidden_states(gathered).tolist() == tokens
        writers = manager.gathered_kv_write_mask
        assert sorted(gathered[writers].tolist()) == tokens
        assert not (writers & ~held).any()
        again = batch.input_ids[manager.padded_gather_idx[held]]
        assert torch.equal(again, gathered[held])
        for name in ("padded_gather_idx", "hidden_restore_idx", "gathered_kv_write_mask"):
            assert torch.equal(getattr(manager, name), getattr(first, name)), name


@run
@given(case=cases())
def test_ranks_agree_on_what_dispatch_sees(partitioned, case):
    stand, batch, locals_ = partitioned(case)
    args = (batch.num_scheduled_tokens, batch.is_prefilling_np)
    counts = {
        (m.get_num_reqs_for_dispatch(*args), m.get_num_tokens_for_dispatch(*args))
        for m in stand.managers
    }
    most_rows = max(local.num_reqs for local in locals_)
    most_tokens = max(local.num_tokens for local in locals_)
    assert counts == {(most_rows, most_tokens)}
    ranks = expected_rows(case)
    replicated = {request for rank in ranks for request, _, whole in rank if whole}
    for manager in stand.managers:
        mask = manager.replicated_requests(*args)
        assert {r for r, tokens in enumerate(case.lens) if tokens and mask[r]} == replicated


@run
@given(case=cases())
def test_dcp_shares_of_rows_that_all_ranks_hold_add_up(partitioned, case):
    stand, _, locals_ = partitioned(case)
    shares = []
    for manager, local in zip(stand.managers, locals_, strict=True):
        local.dcp_local_seq_lens = maybe_prepare_dcp_local_seq_lens(
            manager.input_buffers.dcp_local_seq_lens,
            local.seq_lens,
            local.num_reqs,
            manager.dcp_world_size,
            manager.dcp_rank,
            manager.cp_interleave,
            num_reqs_padded=local.num_reqs_after_padding,
        )
        if case.dcp == 1:
            assert local.dcp_local_seq_lens is None
        else:
            assert len(local.dcp_local_seq_lens) == local.num_reqs_after_padding
            assert not local.dcp_local_seq_lens[local.num_reqs :].any()
            shares.append(local.dcp_local_seq_lens.tolist())
    if not shares:
        return
    sums: dict[int, int] = {}
    for share, rows in zip(shares, expected_rows(case), strict=True):
        for index, (request, _, whole) in enumerate(rows):
            if whole:
                sums[request] = sums.get(request, 0) + share[index]
    assert sums == {request: case.computed[request] + case.lens[request] for request in sums}


@run
@given(case=cases())
def test_attention_inputs_of_every_rank(partitioned, case):
    stand, _, locals_ = partitioned(case)
    token = [(request, k) for request, tokens in enumerate(case.lens) for k in range(tokens)]
    padded = locals_[0].num_tokens_after_padding
    written = [-1] * (padded * case.pcp)
    for rank, rows in enumerate(expected_rows(case)):
        place = rank * padded
        for request, held, whole in rows:
            for k in held:
                written[place] = -1 if whole and rank else token.index((request, k))
                place += 1
    for manager, local in zip(stand.managers, locals_, strict=True):
        tables, slots = manager.prepare_attn(local)
        for index, slot in enumerate(local.idx_mapping.tolist()):
            assert tables[0][index].tolist() == stand.block_ids(slot, 0)
        assert tables[0].shape[0] == local.num_reqs_after_padding
        assert not tables[0][local.num_reqs :].any()
        expected = []
        for t in written:
            if t < 0:
                expected.append(-1)
                continue
            request, k = token[t]
            expected.append(slot_on(stand, manager.dcp_rank, request, case.computed[request] + k))
        assert slots.tolist() == [expected]


def slot_on(stand, dcp_rank: int, request: int, position: int) -> int:
    """Deal positions out one by one: which block of this rank, and how far into it."""
    owner = position // stand.interleave % stand.dcp
    if owner != dcp_rank:
        return -1
    before = sum(p // stand.interleave % stand.dcp == dcp_rank for p in range(position))
    block = stand.block_ids(stand.slot_of(request), 0)[before // stand.block_size]
    return block * stand.block_size + before % stand.block_size
