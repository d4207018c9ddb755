"""C14 end to end: other graphs and allocations between a step and a second look at it."""

from dataclasses import replace

import pytest
import torch

from pcpbench.faults import lifetimes
from pcpbench.faults.fault import Site
from pcpbench.modes import CUDAGraphMode
from pcpbench.results import Outcome
from pcpbench.session.faults import FaultRunner, findings
from pcpbench.session.second_looks import SecondLooks
from pcpbench.session.trial import Trial

CPU = torch.device("cpu")
FAULTS = {fault.name: fault for fault in lifetimes.FAULTS}
SHARDED = {"pcp": 1, "tp": 4, "dcp": 4, "interleave": 2}
PLACES = [
    ("tokens-in-output-buffer", {}),
    ("tokens-in-output-buffer", {"pcp": 4, "scenario": "s4-one-token-prompts"}),
    ("tokens-in-one-buffer", {}),
    ("tokens-in-one-buffer", {"pcp": 2, "tp": 1, "dcp": 1, "scenario": "s3-idle-and-reuse"}),
    ("logits-in-graph-pool", {}),
    ("logits-in-graph-pool", {"pcp": 2, "tp": 1, "dcp": 1, "scenario": "s14-uneven-ranks"}),
    ("plan-in-graph-pool", {}),
    ("plan-in-graph-pool", {**SHARDED, "scenario": "s3-idle-and-reuse", "capture_sizes": "1,2,4"}),
    ("workspace-left-dirty", {}),
    ("workspace-left-dirty", {"pcp": 2, "tp": 2, "scenario": "s3-idle-and-reuse"}),
]


@pytest.fixture(autouse=True)
def _no_poison(monkeypatch):
    """C16 is another module's and takes most of the time."""
    monkeypatch.setattr(Trial, "_verify_poisoned", lambda self: None)


def judged(name, checks="full", **place):
    """What the judge finds with the fault in place; the fault must have acted."""
    fault = FAULTS[name]
    setting, runner, site = replace(fault.setting, checks=checks, **place), FaultRunner(CPU), Site()
    if not fault.at_capture:
        stand = runner._stand_for(setting)
        site = Site({label: arm.engine for label, arm in stand.arms.items()})
        with fault.inject(site):
            result = runner._trial(setting, stand).run()
    else:
        with fault.inject(site):
            stand = runner._builder(setting).stand_for(runner._plan(setting))
            result = runner._trial(setting, stand).run()
    assert site.num_hits
    return result


@pytest.mark.parametrize(("name", "place"), PLACES, ids=lambda value: str(value))
def test_only_second_looks_see_it_and_they_name_what_replayed(name, place):
    assert judged(name, "quick", **place).outcome is Outcome.PASS
    result = judged(name, **place)
    named = [v for v in result.violations if v.contract == "C14"]
    assert named, findings(result)
    assert {v.arm for v in named} == {"full"}
    first = named[0]
    cause = "the next step, " if name == "tokens-in-one-buffer" else "FULL[reqs="
    assert cause in first.message.partition(" changed ")[0]
    tensors = {
        "tokens-in-output-buffer": "sampled",
        "tokens-in-one-buffer": "sampled",
        "logits-in-graph-pool": "logits",
    }
    assert first.tensor in (tensors.get(name, "hidden"),)


@pytest.mark.parametrize("name", FAULTS)
def test_a_second_replay_at_once_is_blind_to_it(name, monkeypatch):
    """What `--check full` had before: same inputs, nothing in between."""

    def at_once(self, arm, step, record):
        if arm.captured and not record.idle:
            self._run_again(arm, step, ())

    monkeypatch.setattr(SecondLooks, "at", at_once)
    assert judged(name).outcome is Outcome.PASS


def test_inputs_are_put_back(bench):
    trial = bench("s7-same-prompt-twice")
    arm, engine = trial.stand.arms["full"], trial.engine("full")
    arm.start(trial.plan)
    for step in trial.plan.steps[:4]:
        arm.execute(step)
    before = arm.record(step, "s")
    assert before.descriptor.cg_mode is CUDAGraphMode.FULL
    caches = [cache.clone() for worker in engine.workers for cache in worker.kv_caches]
    labels = [graph.descriptor for graph in arm.captured]
    assert arm.replay_idle([*labels, "FULL[reqs=999,tokens=999]"]) == tuple(labels)
    after = arm.record(step, "s")
    for name in ("input_ids", "positions", "is_padding", "query_start_loc", "seq_lens",
                 "slot_mappings"):  # fmt: skip
        for one, other in zip(before.ranks, after.ranks, strict=True):
            assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    for one, other in zip(before.ranks, after.ranks, strict=True):
        assert one.block_tables[0].tolist() == other.block_tables[0].tolist()
    now = [cache for worker in engine.workers for cache in worker.kv_caches]
    assert all(torch.equal(a[1:], b[1:]) for a, b in zip(caches, now, strict=True))


def test_an_eager_arm_replays_nothing(bench):
    trial = bench("s7-same-prompt-twice")
    arm = trial.stand.arms["eager"]
    arm.start(trial.plan)
    arm.execute(trial.plan.steps[0])
    assert arm.replay_idle(["FULL[reqs=4,tokens=4]"]) == ()


def run_full(trial):
    result = trial.run(checks="full")
    return [v for v in result.violations if v.contract in ("C9", "C14")], result


def test_inputs_that_are_not_put_back_are_named(bench, monkeypatch):
    """The harness itself: without the inputs a second replay computes something else."""
    trial = bench("s7-same-prompt-twice")
    monkeypatch.setattr("pcpbench.engine.kept_inputs._step_inputs", lambda worker: [])
    found, _ = run_full(trial)
    assert {v.contract for v in found} == {"C14"}


def test_a_dummy_replay_that_writes_live_kv_is_named_with_the_graphs(bench, monkeypatch):
    trial = bench("s7-same-prompt-twice")
    graphs = trial.engine("full").graphs
    replay = graphs.replay

    def faulty(descriptor):
        replay(descriptor)
        worker = trial.engine("full").workers[0]
        if worker.local_batch.req_ids[0].startswith("dummy-") and descriptor.num_tokens == 2:
            worker.kv_caches[1][3, 1] += 1

    monkeypatch.setattr(graphs, "replay", faulty)
    found, _ = run_full(trial)
    (first, *_) = [v for v in found if v.contract == "C9"]
    assert first.arm == "full"
    assert "FULL[reqs=2,tokens=2]" in first.message
    assert "on padding alone wrote layer 1, slot" in first.message


def test_a_second_replay_that_writes_no_kv_is_named(bench, monkeypatch):
    """The step's slots are zeroed first: what stood there cannot pass for a second write."""
    trial = bench("s7-same-prompt-twice")
    engine = trial.engine("full")
    again = type(engine).compute_again

    def faulty(self, output, plan):
        kept = [cache.clone() for worker in self.workers for cache in worker.kv_caches]
        result = again(self, output, plan)
        caches = [cache for worker in self.workers for cache in worker.kv_caches]
        for cache, copy in zip(caches, kept, strict=True):
            cache.copy_(copy)
        return result

    monkeypatch.setattr(type(engine), "compute_again", faulty)
    found, _ = run_full(trial)
    assert {v.tensor for v in found} == {"kv_cache"}


def test_outputs_in_memory_that_is_freed_are_named(bench, monkeypatch):
    """Hidden states in a block that an allocator hands to the next who asks."""
    trial = bench("s7-same-prompt-twice")
    arm = trial.stand.arms["full"]

    @torch.inference_mode()
    def churn():
        sampled = arm._output.sampled
        if sampled:
            sampled[0].hidden[0, 0] = torch.nan

    monkeypatch.setattr(arm, "churn_memory", churn, raising=False)
    found, _ = run_full(trial)
    assert ("C14", "hidden") in {(v.contract, v.tensor) for v in found}
    assert any(v.message.startswith("allocating and freeing memory") for v in found)
