"""What only a judge looks at is kept while one looks, and not while steps are timed or watched."""

import pytest

from pcpbench.device.address_book import AddressBook
from pcpbench.device.clock import HostClock
from pcpbench.engine.engine import Engine
from pcpbench.records import AddressChange
from pcpbench.session.timing import time_arms
from pcpbench.session.tracing import trace_arms


@pytest.fixture
def looks(monkeypatch):
    """How often somebody asked where buffers are."""
    changes, labels = AddressBook.changes, []

    def counting(self, label):
        labels.append(label)
        return changes(self, label)

    monkeypatch.setattr(AddressBook, "changes", counting)
    return labels


def timed(arms, plan, clock):
    return time_arms(arms, plan, None, clock, repetitions=1)


def traced(arms, plan, clock):
    return trace_arms(arms, plan, None, clock)


@pytest.mark.parametrize("run", [timed, traced])
def test_timed_and_traced_steps_look_at_no_addresses(bench, looks, run):
    made = bench("s3-idle-and-reuse", spec_tokens=3, draft_model="mtp")
    arms = [made.stand.arms[label] for label in ("eager", "full")]
    assert run(arms, made.plan, HostClock())
    assert looks == []
    engine = made.engine("full")
    assert engine.keeps_evidence
    assert engine.drafts.keeps_passes
    engine.start(made.plan)
    engine.execute(made.plan.steps[0])
    assert looks


def test_evidence_is_kept_again_after_a_traced_step_that_failed(bench, monkeypatch):
    made = bench("s2-capture-edges")
    arm = made.stand.arms["full"]
    monkeypatch.setattr(arm, "execute_watched", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trace_arms([arm], made.plan, None, HostClock())
    assert arm.engine.keeps_evidence


def test_what_had_moved_before_an_idle_forward_pass_reaches_the_record(bench, monkeypatch):
    made = bench("s3-idle-and-reuse")
    run_idle, moved_buffers = Engine._run_idle, Engine.moved_buffers
    change = AddressChange(
        graph="full",
        name="seq_lens",
        captured_address=64,
        current_address=128,
        op="aten.add.Tensor",
    )
    idles = []

    def moving(self, decision, counts):
        if self is not made.engine("full"):
            return run_idle(self, decision, counts)
        idles.append(decision)
        with monkeypatch.context() as patch:  # and it is back before the step ends
            patch.setattr(Engine, "moved_buffers", lambda self, descriptor: (change,))
            return run_idle(self, decision, counts)

    monkeypatch.setattr(Engine, "_run_idle", moving)
    result = made.run()
    assert idles
    assert Engine.moved_buffers is moved_buffers
    assert {found.contract for found in result.violations} == {"C8"}
    assert {found.arm for found in result.violations} == {"full"}
    idle = [step.index for step in made.plan.steps if not step.scheduled]
    assert {found.step for found in result.violations} <= set(idle)
