"""A scenario's steps under the options of a run. Owns which of the options a plan depends on."""

from __future__ import annotations

from pcpbench.engine.plan_steps import make_plan
from pcpbench.engine_options import EngineOptions
from pcpbench.model.presets import model_shape
from pcpbench.plan import ScenarioPlan
from pcpbench.scenarios.schema import Scenario
from pcpbench.targets.protocol import Target


def plan_for(target: Target, scenario: Scenario, options: EngineOptions) -> ScenarioPlan:
    """The same with each step's requests in the order of a target's batches."""
    return target.arrange(plan_scenario(scenario, options), 1 + options.spec_tokens)


def plan_scenario(scenario: Scenario, options: EngineOptions) -> ScenarioPlan:
    """The plan that all arms of a run are fed; raises UsageError for limits it cannot meet."""
    shape = model_shape(options.preset)
    return make_plan(
        scenario,
        vocab_size=shape.vocab_size,
        kv_groups=shape.kv_groups,
        dcp_size=options.dcp,
        max_num_seqs=options.max_num_seqs,
        seed=options.seed,
        num_speculative_tokens=options.spec_tokens,
        dynamic_spec=options.dynamic_spec,
        num_lookahead_tokens=options.num_lookahead_tokens,
    )
