"""Faults of FAULTS.md planted into the engine: each must fail, by a contract that fits, by name.

The padding faults hit every arm alike. Replay and padded eager then agree bit for bit, so that only
the rebuild from the plan can notice.
"""

import pytest
import torch

from pcpbench import cli
from pcpbench.device.host_graph.pool import Block, HostPool
from pcpbench.engine import block_table
from pcpbench.engine.engine import Engine
from pcpbench.engine.input_batch import InputBuffers
from pcpbench.engine.request_state import RequestState
from pcpbench.engine.worker import Worker
from pcpbench.pcp_manager import PCPManager
from pcpbench.results import Outcome

SCENARIO = "s1-grow-shrink"


def k01_stale_seq_lens(monkeypatch):
    pad = InputBuffers.pad

    def faulty(self, num_reqs, num_reqs_padded, num_tokens, num_padded):
        stale = self.seq_lens[num_reqs:num_reqs_padded].clone()
        pad(self, num_reqs, num_reqs_padded, num_tokens, num_padded)
        self.seq_lens[num_reqs:num_reqs_padded].copy_(stale)

    monkeypatch.setattr(InputBuffers, "pad", faulty)


def k02_stale_slots(monkeypatch):
    prepare = PCPManager.prepare_slot_mappings

    def faulty(self):
        before = self.slot_mappings.clone()
        slots = prepare(self)
        padding = ~self.gathered_kv_write_mask
        slots[:, padding] = before[:, : slots.shape[1]][:, padding]
        return slots

    monkeypatch.setattr(PCPManager, "prepare_slot_mappings", faulty)


def k03_stale_block_rows(monkeypatch):
    def faulty(table, idx_mapping, out):
        torch.index_select(table, 0, idx_mapping, out=out[: idx_mapping.shape[0]])

    monkeypatch.setattr(block_table, "gather_rows", faulty)


def k10_captured_buffer_replaced(monkeypatch):
    views = InputBuffers.views

    def faulty(self, num_reqs, num_tokens):
        if not getattr(self, "cloned", False) and getattr(self, "armed", False):
            self.positions, self.cloned = self.positions.clone(), True
        return views(self, num_reqs, num_tokens)

    monkeypatch.setattr(InputBuffers, "views", faulty)


FAULTS = [
    (k01_stale_seq_lens, {"C1"}, "seq_lens"),
    (k02_stale_slots, {"C4"}, "slot_mappings"),
    (k03_stale_block_rows, {"C5"}, "block_tables"),
    (k10_captured_buffer_replaced, {"C8", "C13"}, "rank1.positions"),
]


@pytest.mark.parametrize(("plant", "contracts", "tensor"), FAULTS)
def test_a_planted_fault_is_named(bench, monkeypatch, plant, contracts, tensor):
    trial = bench(SCENARIO)
    for worker in trial.engine("full").workers[1:]:
        worker.pcp_manager.input_buffers.armed = True
    plant(monkeypatch)
    result = trial.run()
    assert result.outcome is Outcome.FAIL
    assert contracts <= {v.contract for v in result.violations}
    named = [v for v in result.violations if v.contract in contracts and tensor in v.tensor]
    assert named
    assert all(v.scenario == SCENARIO and v.step >= 0 for v in named)
    if contracts != {"C8", "C13"}:
        assert {v.arm for v in named} >= {"full", "eager_padded[full]"}
        assert {v.rank for v in named} <= {0, 1}
    assert result.tpot_ratio is None, "no speed without a pass"


@pytest.mark.parametrize("plant", [fault[0] for fault in FAULTS[:3]])
def test_compare_exits_1_and_says_where(monkeypatch, capsys, tmp_path, plant):
    plant(monkeypatch)
    arguments = ["compare", "eager", "full", "--scenario", SCENARIO, "--repetitions", "1"]
    assert cli.run([*arguments, "--out", str(tmp_path / "run")]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    tensor = dict((f[0], f[2]) for f in FAULTS)[plant]
    assert SCENARIO in printed
    assert "step" in printed
    assert "rank" in printed
    assert tensor in printed


def test_the_same_trial_without_a_fault_passes(bench):
    result = bench(SCENARIO).run(repetitions=1)
    assert result.outcome is Outcome.PASS
    assert result.violations == ()
    assert result.tpot_ratio is not None


def test_a_rank_that_skips_a_collective_is_a_result_not_a_crash(bench, monkeypatch):
    from pcpbench.model.mla import MLAAttention

    attend = MLAAttention.attend

    async def faulty(self, q, kv, out, lse, context, index=None):
        if context.rank == 1 and self.layer == 1 and context.metadata is not None:
            out.zero_()
            return
        await attend(self, q, kv, out, lse, context, index)

    trial = bench(SCENARIO)
    monkeypatch.setattr(MLAAttention, "attend", faulty)
    result = trial.run()
    assert result.outcome is Outcome.FAIL
    assert result.violations[0].contract == "C11"
    assert "rank 0" in result.violations[0].message


def test_ranks_that_dispatch_on_their_own_counts_are_named(bench, monkeypatch):
    from pcpbench.engine.worker import Worker

    prepare = Worker.prepare_inputs

    def faulty(self, plan):
        counts = prepare(self, plan)
        if self.rank == 1 and not counts.has_prefill:
            return type(counts)(1, 1, 1, False, 1)
        return counts

    trial = bench(SCENARIO)
    monkeypatch.setattr(Worker, "prepare_inputs", faulty)
    result = trial.run()
    assert result.outcome is Outcome.FAIL
    assert {v.contract for v in result.violations} == {"C10"}


def test_a_graph_that_silently_runs_eagerly_is_named(bench, monkeypatch):
    """What dispatch chose is no proof of what ran: launches are counted where they happen."""
    from pcpbench.device.collectives import run_lockstep
    from pcpbench.engine.engine import Engine

    trial = bench(SCENARIO)
    full = trial.engine("full")
    forward = Engine._forward

    def eager(self, descriptor):
        if self is not full:
            return forward(self, descriptor)
        return run_lockstep([worker.forward(into_buffer=False) for worker in self.workers])

    monkeypatch.setattr(Engine, "_forward", eager)
    result = trial.run()
    assert result.outcome is Outcome.FAIL
    assert {v.contract for v in result.violations} == {"C10"}
    assert "no graph was launched" in result.violations[0].message


def test_an_output_that_is_wrong_on_one_rank_only_is_named(bench, monkeypatch):
    """Rank 0 is what other arms are held against; a rank that restores wrongly must not hide."""
    restore = PCPManager.restore_hidden_states

    def faulty(self, hidden_states):
        restored = restore(self, hidden_states)
        return restored.roll(1, 0) if self.pcp_rank == 1 else restored

    trial = bench(SCENARIO)
    monkeypatch.setattr(PCPManager, "restore_hidden_states", faulty)
    result = trial.run()
    assert result.outcome is Outcome.FAIL
    assert {(v.contract, v.rank) for v in result.violations} == {("C7", 1)}
    assert {v.tensor for v in result.violations} >= {"hidden"}


def test_a_replay_that_goes_wrong_only_in_timed_passes_is_named(bench, monkeypatch):
    """No speed without a passed comparison: the runs that are timed are held against the judged."""
    from pcpbench.targets.builtin import BuiltinArm

    trial, starts = bench("s2-capture-edges"), []
    start, sampled = BuiltinArm.start, BuiltinArm.sampled

    def counted(self, plan):
        starts.append(self.label)
        start(self, plan)

    def faulty(self):
        tokens = sampled(self)
        late = self.label == "full" and starts.count("full") > 1
        return [token + 1 for token in tokens] if late else tokens

    monkeypatch.setattr(BuiltinArm, "start", counted)
    monkeypatch.setattr(BuiltinArm, "sampled", faulty)
    result = trial.run(repetitions=1)
    assert result.outcome is Outcome.FAIL
    assert {(v.contract, v.arm) for v in result.violations} == {("C14", "full")}
    assert result.tpot_ratio is None


def test_memory_that_nobody_owns_fails_a_compare_too(bench, monkeypatch):
    from pcpbench.model.decoder import MLADecoder

    forward, stray = MLADecoder.forward, torch.zeros(1)

    async def faulty(self, input_ids, positions, context):
        return (await forward(self, input_ids, positions, context)) + stray

    monkeypatch.setattr(MLADecoder, "forward", faulty)
    result = bench("s2-capture-edges").run()
    assert result.outcome is Outcome.FAIL
    assert {v.contract for v in result.violations} == {"C8"}
    assert "nobody owns" in result.violations[0].message


def test_sampling_from_the_wrong_row_is_named_though_all_arms_do_it(bench, monkeypatch):
    from pcpbench.engine.worker import Worker

    sample = Worker.sample

    async def first_rows(self, hidden, plan):
        batch = self.global_batch
        right = batch.query_start_loc_np.copy()
        batch.query_start_loc_np[1:] -= batch.num_scheduled_tokens - 1
        try:
            return await sample(self, hidden, plan)
        finally:
            batch.query_start_loc_np[:] = right

    trial = bench("s4-one-token-prompts")
    monkeypatch.setattr(Worker, "sample", first_rows)
    result = trial.run()
    assert result.outcome is Outcome.FAIL
    named = {(v.contract, v.tensor) for v in result.violations}
    # The logits of the reference are then not those of its tokens, either.
    assert named == {("C7", "sampled_rows"), ("C18", "logits")}
    assert {v.arm for v in result.violations} >= {"reference", "eager", "full"}


def test_a_token_that_is_not_the_best_is_named(bench, sample_the_worst):
    trial = bench("s2-capture-edges")
    sample_the_worst()
    result = trial.run()
    assert result.outcome is Outcome.FAIL
    assert {(v.contract, v.tensor) for v in result.violations} == {("C7", "sampled")}


def admitted_before_others_leave(monkeypatch):
    update, remove = Worker.update_states, RequestState.remove_request

    def faulty(self, plan, tokens):
        left = []
        with monkeypatch.context() as patch:
            patch.setattr(RequestState, "remove_request", lambda _, req_id: left.append(req_id))
            update(self, plan, tokens)
        for req_id in left:
            remove(self.request_state, req_id)

    monkeypatch.setattr(Worker, "update_states", faulty)


def second_preemption_resumes_from_the_first(monkeypatch):
    class Kept(dict):
        def __setitem__(self, req_id, tokens):
            self.setdefault(req_id, tokens)

        def pop(self, req_id):
            return self[req_id]

    make = Engine.__init__

    def faulty(self, *arguments, **settings):
        make(self, *arguments, **settings)
        self._tokens = Kept()

    monkeypatch.setattr(Engine, "__init__", faulty)


def pool_blocks_rounded_down(monkeypatch):
    """A block's length is rounded down to the alignment: the next one begins inside it.

    With as many rows as a power of two every intermediate of `tiny` is a multiple of 64 bytes, or
    fits into 64; five rows (of 16 bytes, say) are neither.
    """
    take = HostPool.take

    def faulty(self, num_bytes, exclusive=False):
        block = take(self, max(64, num_bytes // 64 * 64), exclusive)
        if exclusive or num_bytes <= block.num_bytes:
            return block
        (segment,) = [s for s in self._segments if 0 <= block.address - s.base < len(s.memory)]
        start = block.address - segment.base
        longer = Block(self, block.address, segment.memory[start : start + num_bytes], exclusive)
        self._blocks[block.address] = longer
        return longer

    monkeypatch.setattr(HostPool, "take", faulty)


@pytest.mark.parametrize(
    ("plant", "contracts"),
    [
        (admitted_before_others_leave, {"C0"}),
        (second_preemption_resumes_from_the_first, {"C3", "C18"}),
        (pool_blocks_rounded_down, {"C13"}),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # freed twice
def test_what_only_a_full_house_shows(bench, monkeypatch, plant, contracts):
    """Mutations of the blind test that every other shipped scenario lets pass."""
    plant(monkeypatch)
    result = bench("full-house").run()
    assert result.outcome is Outcome.FAIL
    assert contracts <= {violation.contract for violation in result.violations}
