"""C9, C14, C15 and C16: each with a fault planted that must fire, and clean runs that must not."""

import numpy as np
import pytest
import torch

from pcpbench.engine import dummy_run
from pcpbench.engine import engine as engine_module
from pcpbench.engine.engine import Engine
from pcpbench.engine.worker import Worker
from pcpbench.errors import CannotMeasure, CollectiveMismatch
from pcpbench.model import attention, mla
from pcpbench.model.decoder import DecoderLayer
from pcpbench.pcp_manager import PCPManager
from pcpbench.results import Outcome

WORLDS = [{"pcp": 2}, {"pcp": 1, "tp": 4, "dcp": 4, "interleave": 2}]
TWIN = "eager_padded[full]"


def fired(result, contract):
    return [v for v in result.violations if v.contract == contract]


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("candidate", ["full", "full_and_piecewise"])
def test_clean_engines_pass_every_check(bench, world, candidate):
    result = bench("s3-idle-and-reuse", candidate, **world).run(checks="full")
    assert result.outcome is Outcome.PASS, result.reasons
    assert result.violations == ()


def test_clean_half_precision_passes_every_check(bench):
    result = bench("s2-capture-edges", "full", dtype="bfloat16").run(checks="full")
    assert result.outcome is Outcome.PASS, result.reasons


def test_arms_that_feed_themselves_pass_every_check(bench):
    result = bench("preemption", "piecewise", base="full", forced=False).run(checks="full")
    assert result.outcome is Outcome.PASS, result.reasons


# C15


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_write_past_the_slot_mapping_is_named(bench, monkeypatch, world):
    """Every arm makes it alike, so that no comparison of arms can see it."""
    trial = bench("s7-same-prompt-twice", "full", **world)
    execute = Engine.execute

    def faulty(self, plan, *feed):
        output = execute(self, plan, *feed)
        if plan.index == 9:
            for worker in self.workers:
                worker.kv_caches[1].view(-1, worker.kv_caches[1].shape[-1])[-1] += 1
        return output

    monkeypatch.setattr(Engine, "execute", faulty)
    found = fired(trial.run(), "C15")
    assert {v.arm for v in found} == {"reference", "eager", TWIN, "full"}
    assert {v.step for v in found} == {9}
    size = trial.engine("full").config.parallel_config.world.size
    assert {v.rank for v in found if v.arm == "full"} == set(range(size))
    assert all("layer 1, slot" in v.message for v in found)


def test_a_write_to_the_null_block_in_a_real_step_is_named(bench, monkeypatch):
    trial = bench("s7-same-prompt-twice")

    def faulty(kv, slots, cache):
        attention.kv_cache_write(kv, slots.clamp(min=0), cache)

    monkeypatch.setattr(mla, "kv_cache_write", faulty)
    found = fired(trial.run(), "C15")
    assert {v.arm for v in found} >= {"eager", TWIN}
    assert "block 0" in found[0].message


def test_slots_that_are_never_written_are_named(bench, monkeypatch):
    trial = bench("s7-same-prompt-twice")

    def faulty(kv, slots, cache):
        attention.kv_cache_write(kv[1:], slots[1:], cache)

    monkeypatch.setattr(mla, "kv_cache_write", faulty)
    found = fired(trial.run(), "C15")
    assert found
    assert "not written" in found[0].message


# C9


def test_a_dummy_run_with_real_slots_is_named(bench, monkeypatch):
    """K06, captured too: the smallest graph writes block 2 whenever nothing is scheduled."""
    stage = dummy_run.stage_dummy_batch

    def faulty(worker, descriptor):
        batch = stage(worker, descriptor)
        if worker.context.metadata is not None:
            slots = worker.context.metadata.slot_mappings
            slots.copy_(torch.arange(slots.shape[1]) + 2 * worker.kv_caches[0].shape[1])
        return batch

    monkeypatch.setattr("pcpbench.engine.engine.stage_dummy_batch", faulty)
    result = bench("s3-idle-and-reuse").run()
    found = fired(result, "C9")
    assert {v.arm for v in found} >= {"full"}
    assert any(v.message.startswith("capture wrote") for v in found)
    assert any("idle step wrote outside the null block" in v.message for v in found)


def test_a_dummy_run_that_clears_global_tables_is_named(bench, monkeypatch):
    stage = dummy_run.stage_dummy_batch

    def faulty(worker, descriptor):
        batch = stage(worker, descriptor)
        worker.block_tables.block_tables[0][: batch.num_reqs].zero_()
        return batch

    monkeypatch.setattr("pcpbench.engine.engine.stage_dummy_batch", faulty)
    found = fired(bench("s3-idle-and-reuse").run(), "C9")
    assert {v.tensor for v in found} == {"global.block_tables.0"}
    assert {v.arm for v in found} >= {"eager", "full"}


# C14


@pytest.mark.parametrize("candidate", ["full", "piecewise"])
def test_a_replay_that_accumulates_is_named(bench, monkeypatch, candidate):
    """The second replay starts from what the first one left in a buffer."""
    trial = bench("s7-same-prompt-twice", candidate)
    graphs = trial.engine(candidate).graphs
    replay, seen = graphs.replay, []

    def faulty(descriptor):
        replay(descriptor)
        worker = trial.engine(candidate).workers[0]
        key = worker.input_buffers.seq_lens.sum().item(), worker.local_buffers.positions.sum()
        if seen and seen[-1] == key:
            worker.hidden_states[0] += 1
            worker.kv_caches[0][-1, 0] += 1
        seen.append(key)

    monkeypatch.setattr(graphs, "replay", faulty)
    assert not fired(trial.run(), "C14"), "only --check full replays twice"
    result = trial.run(checks="full")
    found = fired(result, "C14")
    assert {v.arm for v in found} == {candidate}
    assert {v.tensor for v in found} >= {"hidden", "kv_cache"}


# C16


def quantised(x):
    """Values rounded to 127 steps of the largest one in the whole tensor, padding included."""
    scale = x.abs().amax() / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_padding_rows_that_set_a_scale_are_named(bench, monkeypatch, world):
    """K07: replay and padded eager agree on it."""
    forward = DecoderLayer.forward

    async def faulty(self, x, *rest):
        return await forward(self, quantised(x), *rest)

    monkeypatch.setattr(DecoderLayer, "forward", faulty)
    result = bench("s2-capture-edges", **world).run(checks="full")
    assert {v.arm for v in fired(result, "C16")} >= {"full"}
    assert not fired(result, "C13")


def unmasked_keys(kv_cache, table, num_keys, first):
    """Keys of whole blocks: those past a row's length arrive, to be multiplied by zero."""
    block_size, width = kv_cache.shape[1:]
    longest = max(num_keys)
    slots = (table[:, : -(-longest // block_size), None] * block_size) + np.arange(block_size)
    flat = torch.from_numpy(slots.reshape(len(table), -1)[:, :longest].reshape(-1).copy())
    keys = kv_cache.view(-1, width).index_select(0, flat)
    return keys.float().view(len(table), longest, width)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_unread_keys_times_zero_are_named(bench, monkeypatch, world):
    """K05: a zero weight times whatever stands in a stale or null block."""
    trial = bench("s4-one-token-prompts", **world)
    monkeypatch.setattr(attention, "_gather_keys", unmasked_keys)
    quick = trial.run()
    assert quick.outcome is Outcome.PASS, "without poison those keys are finite"
    found = fired(trial.run(checks="full"), "C16")
    assert {v.arm for v in found} == {"eager", TWIN, "full"}
    assert all("nan" in v.message for v in found)


def test_slots_that_are_not_rewritten_are_named(bench, monkeypatch):
    """K02: under poison the stale tail names a live slot, and padding overwrites it."""
    prepare = PCPManager.prepare_slot_mappings

    def faulty(self):
        before = self.slot_mappings.clone()
        slots = prepare(self)
        padding = ~self.gathered_kv_write_mask
        slots[:, padding] = before[:, : slots.shape[1]][:, padding]
        return slots

    trial = bench("s2-capture-edges")
    monkeypatch.setattr(PCPManager, "prepare_slot_mappings", faulty)
    assert fired(trial.run(checks="full"), "C16")


def test_pool_memory_that_is_read_before_it_is_written_is_named(bench, monkeypatch):
    """A graph that adds a free byte of its pool to its output."""
    trial = bench("s2-capture-edges")
    full = trial.engine("full")
    replay = full.graphs.replay

    def stale(descriptor):
        segment = full.graphs.pool._segments[0]
        start, length = max(segment.free, key=lambda span: span[1])
        value = segment.memory[start : start + 4 * (length // 4)].view(np.float32)[0]
        replay(descriptor)
        full.workers[0].hidden_states[0] += float(np.nan_to_num(value, nan=1e9)) * 1e-30

    monkeypatch.setattr(full.graphs, "replay", stale)
    assert fired(trial.run(checks="full"), "C16")


def register_workspaces(monkeypatch, use, scratch):
    """Give every rank a registered buffer of one number; `use(hidden, space)` is what it is for."""
    spaces, forward, register = {}, Worker.forward, engine_module.register_buffers

    def faulty_register(book, workers, shards):
        register(book, workers, shards)
        for worker in workers:
            space = spaces[id(worker)] = torch.zeros(1, dtype=worker.model.dtype)
            book.register(f"rank{worker.rank}.space", lambda space=space: space, scratch=scratch)

    async def faulty_forward(self, *, into_buffer):
        hidden = use(await forward(self, into_buffer=False), spaces[id(self)])
        return self.hidden_states[: len(hidden)].copy_(hidden) if into_buffer else hidden

    monkeypatch.setattr(engine_module, "register_buffers", faulty_register)
    monkeypatch.setattr(Worker, "forward", faulty_forward)


def reads_first(hidden, space):
    return hidden + space


def writes_first(hidden, space):
    return hidden + space.zero_()


@pytest.mark.parametrize("use", [reads_first, writes_first])
def test_scratch_that_is_read_before_it_is_written_is_named(bench, monkeypatch, use):
    register_workspaces(monkeypatch, use, scratch=True)
    result = bench("s7-same-prompt-twice").run(checks="full")
    arms = {v.arm for v in fired(result, "C16")}
    assert arms == ({"eager", TWIN, "full"} if use is reads_first else set())
    assert (result.outcome is Outcome.PASS) == (use is writes_first)


def test_pool_memory_is_poisoned_after_use_not_only_when_free(bench):
    """PIECEWISE segments hold on to what they hand to each other."""
    trial = bench("s7-same-prompt-twice", "piecewise")
    arm, pool = trial.stand.arms["piecewise"], trial.engine("piecewise").graphs.pool
    assert pool.num_bytes_free < pool.num_bytes
    slots = trial.plan.num_blocks * trial.plan.block_sizes[0]
    arm.poison([[np.zeros(slots, dtype=np.bool_)]] * 2, "nan")
    assert all((segment.memory == 0xFF).all() for segment in pool._segments)


@pytest.mark.parametrize(
    ("error", "is_finding"),
    [
        (IndexError("index 9 is out of bounds"), True),
        (RuntimeError("index out of range in self"), True),
        (CollectiveMismatch("ranks met in different collectives"), True),
        (TypeError("of another kind"), True),
        (CannotMeasure("no such device"), False),
        (torch.OutOfMemoryError("no memory"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_in_a_poisoned_step_is_a_finding_only_if_it_is_the_steps(
    bench, monkeypatch, error, is_finding
):
    trial = bench("s7-same-prompt-twice")
    arm, poisoned = trial.stand.arms[TWIN], []
    poison, execute = arm.poison, arm.engine.execute

    def spy(unread, kind):
        poisoned.append(kind)
        poison(unread, kind)

    def faulty(*arguments):
        if poisoned:
            raise error
        return execute(*arguments)

    monkeypatch.setattr(arm, "poison", spy)
    monkeypatch.setattr(arm.engine, "execute", faulty)
    if not is_finding:
        with pytest.raises(CannotMeasure):
            trial.run(checks="full")
        return
    found = fired(trial.run(checks="full"), "C16")
    assert {(v.arm, v.tensor) for v in found} == {(TWIN, "step")}
    assert type(error).__name__ in found[0].message
