"""No sound plan is taken for a damaged one, whatever the model, the world and the drafts are."""

import pytest
from msgspec.structs import replace

from pcpbench.config import PRESETS
from pcpbench.divergence import Accusation, Divergence
from pcpbench.engine_options import EngineOptions
from pcpbench.plan import ScenarioPlan
from pcpbench.scenarios.loader import load_scenario, shipped_names
from pcpbench.session.case import Case, plan_findings, problem_of
from pcpbench.session.planning import plan_scenario

WORLDS = {
    "pcp": EngineOptions(pcp=2),
    "dcp": EngineOptions(pcp=1, tp=4, dcp=4, interleave=2),
    "both": EngineOptions(pcp=2, dcp=2, interleave=2, model="tiny-sparse"),
    "drafts": EngineOptions(pcp=2, spec_tokens=3),
    "varying drafts": EngineOptions(pcp=2, spec_tokens=3, dynamic_spec="step"),
    "many seqs": EngineOptions(pcp=2, max_num_seqs=70),
    **{preset: EngineOptions(pcp=2, model=preset) for preset in PRESETS},
}


def case_of(plan: ScenarioPlan, options: EngineOptions, step: int, contract="C13") -> Case:
    cut = replace(plan, steps=plan.steps[: step + 1], is_cut_short=step + 1 < len(plan.steps))
    accusation = Accusation(
        finding="contract", kind="capture", arm="full", twin="eager_padded[full]", step=step,
        last_step=step, rank=None, layer=None, tensor="hidden", contract=contract, message="m",
    )  # fmt: skip
    fed = [sum(share.num_logits for share in each.scheduled) for each in cut.steps]
    return Case(
        options=options,
        base="eager",
        candidate="full",
        accusation=accusation,
        plan=cut,
        plan_findings=plan_findings(cut),
        tokens=tuple((0,) * count for count in fed),
        drafts=tuple((0,) * each.num_draft_tokens for each in cut.steps),
    )


def problem(case: Case) -> str:
    plan = case.plan
    found = Divergence(
        scenario=plan.scenario, accusation=case.accusation, reproduced="no", plan=plan.steps[-1]
    )
    return problem_of(case, found)


@pytest.mark.parametrize("options", WORLDS.values(), ids=WORLDS)
def test_a_sound_plan_is_never_damaged_wherever_it_is_cut(options):
    options.check()
    for name in shipped_names():
        plan = plan_scenario(load_scenario(name), options)
        last = len(plan.steps) - 1
        for step in (0, last // 2, last):
            case = case_of(plan, options, step)
            assert case.plan_findings == ()
            assert problem(case) == "", (name, step)


def test_every_contract_may_be_what_a_bundle_accuses_of():
    plan = plan_scenario(load_scenario("s2-capture-edges"), EngineOptions())
    for number in range(23):
        assert problem(case_of(plan, EngineOptions(), 1, f"C{number}")) == ""
    assert "C23" in problem(case_of(plan, EngineOptions(), 1, "C23"))
