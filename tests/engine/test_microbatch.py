"""The cut, the buffers of each half, and what a cut step computes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcpbench.config import EngineConfig, ParallelConfig
from pcpbench.device.backends import resolve_backend
from pcpbench.engine import microbatch
from pcpbench.engine.engine import Engine
from pcpbench.engine.microbatch import add_cut_twins, cut_rows
from pcpbench.engine.plan_steps import make_plan
from pcpbench.engine_options import EngineOptions
from pcpbench.errors import UsageError
from pcpbench.model.presets import model_shape
from pcpbench.modes import ARM_MODES, BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.scenarios.loader import load_scenario

CPU = torch.device("cpu")
DBO = ParallelConfig(enable_dbo=True)
WORLDS = {
    "one rank": {"pcp": 1},
    "pcp 2": {"pcp": 2},
    "tp 2 dcp 2": {"pcp": 1, "tp": 2, "dcp": 2, "interleave": 2},
    "pcp 2 dcp 2": {"pcp": 2, "dcp": 2},
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def starts_of(*lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def facts(cut):
    return (
        cut.rows.tolist(), cut.length.tolist(), cut.tokens_before.tolist(),
        cut.tokens_after.tolist(), cut.num_tokens,
    )  # fmt: skip


def test_a_request_across_the_cut_is_in_both_halves():
    starts = starts_of(3, 4, 1)
    assert facts(cut_rows(starts, 3, 0, 4)) == ([0, 1], [3, 1], [0, 0], [0, 3], 4)
    assert facts(cut_rows(starts, 3, 4, 8)) == ([1, 2], [3, 1], [1, 0], [0, 0], 4)


def test_a_half_of_padding_keeps_the_last_request_with_no_tokens():
    starts = np.array([0, 1, 2, 2, 2], dtype=np.int32)  # two rows and two of padding
    assert facts(cut_rows(starts, 2, 2, 4)) == ([1], [0], [1], [0], 0)
    idle = np.array([0, 0], dtype=np.int32)  # a rank with nothing to do
    assert facts(cut_rows(idle, 1, 0, 2)) == ([0], [0], [0], [0], 0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 9))
def test_both_halves_hold_every_token_once(lengths, padding):
    starts, total = starts_of(*lengths), sum(lengths) + padding
    cuts = [cut_rows(starts, len(lengths), 0, total // 2)] if total > 1 else []
    cuts += [cut_rows(starts, len(lengths), total // 2, total)]
    held = [
        (int(row), int(before) + i)
        for cut in cuts
        for row, before, length in zip(cut.rows, cut.tokens_before, cut.length, strict=True)
        for i in range(length)
    ]
    assert held == [(row, i) for row, length in enumerate(lengths) for i in range(length)]
    for cut in cuts:
        whole = cut.tokens_before + cut.length + cut.tokens_after
        assert (whole <= np.array(lengths)[cut.rows]).all()
        assert (whole == np.array(lengths)[cut.rows]).all() or not cut.num_tokens


def test_twins_follow_their_originals_and_only_where_a_step_can_be_cut():
    full = [BatchExecutionDescriptor(CUDAGraphMode.FULL, n, n, 1) for n in (4, 1)]
    labels = [d.label for d in add_cut_twins(full, DBO)]
    assert labels == [
        "FULL[reqs=4,tokens=4]", "FULL[reqs=4,tokens=4,ubatches=2]", "FULL[reqs=1,tokens=1]",
    ]  # fmt: skip
    assert add_cut_twins(full, ParallelConfig()) == tuple(full)


@pytest.mark.parametrize(
    ("num_tokens", "has_prefill", "count"),
    [(1, False, 1), (2, False, 2), (3, True, 1), (4, True, 2)],
)
def test_a_step_is_cut_from_its_threshold_up(num_tokens, has_prefill, count):
    assert DBO.num_ubatches_for(num_tokens, has_prefill) == count
    assert ParallelConfig().num_ubatches_for(num_tokens, has_prefill) == 1


@pytest.mark.parametrize("name", ["dbo_decode_token_threshold", "dbo_prefill_token_threshold"])
def test_a_threshold_that_would_cut_one_token_is_refused(name):
    with pytest.raises(UsageError, match=f"{name} is 1"):
        EngineConfig(parallel_config=ParallelConfig(**{name: 1})).check()


class Run:
    """One scenario on one engine; what each step computed."""

    def __init__(self, scenario, arm="eager", replays=False, microbatch=True, taps=False, **world):
        options = EngineOptions(microbatch=microbatch, **world)
        self.plan = make_plan(
            load_scenario(scenario),
            vocab_size=model_shape(options.preset).vocab_size,
            dcp_size=options.dcp,
            seed=0,
        )
        config = options.engine_config(
            ARM_MODES[arm],
            device="cpu",
            max_num_seqs=self.plan.max_num_seqs,
            max_num_batched_tokens=self.plan.max_num_batched_tokens,
            max_model_len=self.plan.max_model_len,
            block_size=self.plan.block_sizes[0] // options.dcp,
            num_blocks=self.plan.num_blocks,
        )
        self.engine = Engine(config, CPU, resolve_backend("auto", CPU) if replays else None, taps)
        self.engine.capture()

    def steps(self):
        self.engine.start(self.plan)
        for step in self.plan.steps:
            yield step, self.engine.execute(step)

    def hidden(self):
        return [[s.hidden.clone() for s in output.sampled] for _, output in self.steps()]


def equal(ours, theirs):
    return all(
        torch.equal(mine, other)
        for step, twin in zip(ours, theirs, strict=True)
        for mine, other in zip(step, twin, strict=True)
    )


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_cut_steps_compute_what_whole_ones_do(world):
    whole = Run("chunked-prefill", microbatch=False, **world).hidden()
    cut = Run("chunked-prefill", **world)
    ours = cut.hidden()
    for step, twin in zip(ours, whole, strict=True):
        for mine, other in zip(step, twin, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    assert not equal(ours, whole), "smaller GEMMs round differently: was anything cut?"


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("arm", ["eager", "full_and_piecewise"])
def test_the_order_of_turns_changes_no_bit(monkeypatch, arm, world):
    ours = Run("chunked-prefill", arm, replays=arm != "eager", **world).hidden()

    async def backwards(routines):
        return (await take_turns(routines[::-1]))[::-1]

    take_turns = microbatch.take_turns
    monkeypatch.setattr(microbatch, "take_turns", backwards)
    theirs = Run("chunked-prefill", arm, replays=arm != "eager", **world).hidden()
    assert equal(ours, theirs)


def test_rows_past_the_real_ones_are_neutral_whatever_stood_there():
    run = Run("s2-capture-edges", "full", replays=False, pcp=2)
    seen = 0
    for step in run.plan.steps:
        for worker in run.engine.workers:
            for own in worker.microbatches.buffers:
                for tensor in own.named().values():
                    tensor.fill_(9977)
        run.engine.execute(step)
        for worker in run.engine.workers:
            for part in worker.microbatches.parts:
                batch, metadata = part.batch, part.metadata
                seen += batch.num_reqs_after_padding - batch.num_reqs
                assert not batch.seq_lens[batch.num_reqs :].any()
                assert (batch.query_start_loc[batch.num_reqs :] == batch.num_tokens).all()
                assert not metadata.block_tables[0][batch.num_reqs :].any()
                assert 9977 not in metadata.slot_mappings
    assert seen, "no microbatch had a padded row"


def test_under_full_the_shape_alone_decides_the_rows_of_a_half():
    run = Run("s2-capture-edges", "full", replays=False, pcp=2)
    shapes = {}
    for _, output in run.steps():
        descriptor = output.decision.descriptor
        if descriptor.cg_mode is not CUDAGraphMode.FULL:
            continue
        for worker in run.engine.workers:
            rows = [p.batch.num_reqs_after_padding for p in worker.microbatches.parts]
            shapes.setdefault(descriptor, []).append(rows)
    assert any(d.num_ubatches == 2 for d in shapes)
    for descriptor, found in shapes.items():
        assert all(rows == found[0] for rows in found), descriptor.label


def test_without_the_option_there_is_nothing_of_it():
    run = Run("s1-grow-shrink", "full", replays=False, microbatch=False)
    assert all(worker.microbatches is None for worker in run.engine.workers)
    assert {d.num_ubatches for d in run.engine.candidates.descriptors} == {1}
    assert not [name for name in run.engine.address_book._getters if "ubatch" in name]


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_taps_of_both_halves_lie_where_those_of_the_whole_batch_do(world):
    kept = []
    for microbatch_on in (False, True):
        run = Run("s16-microbatch-cut", microbatch=microbatch_on, taps=True, **world)
        seen = []
        for number, (_, output) in enumerate(run.steps()):
            if number < 6 and output.sampled:
                seen.append([
                    (t.rank, t.layer, t.op, t.tensor, t.values)
                    for w in run.engine.workers
                    for t in w.taps.records(w.rank, w.local_batch.num_tokens_after_padding)
                ])  # fmt: skip
        kept.append(seen)
    for whole, cut in zip(*kept, strict=True):
        assert [tap[:4] for tap in whole] == [tap[:4] for tap in cut]
        for theirs, ours in zip(whole, cut, strict=True):
            np.testing.assert_allclose(ours[4], theirs[4], rtol=1e-3, atol=1e-4)
