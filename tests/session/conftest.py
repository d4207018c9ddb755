"""Trials on the built-in target, small enough to run many of."""

from __future__ import annotations

import pytest
import torch

from pcpbench.device.backends import resolve_backend
from pcpbench.device.clock import make_clock
from pcpbench.engine.plan_steps import make_plan
from pcpbench.engine_options import EngineOptions
from pcpbench.model.presets import model_shape
from pcpbench.scenarios.loader import load_scenario
from pcpbench.session.ladder import build_ladder
from pcpbench.session.stand import StandBuilder
from pcpbench.session.trial import Trial
from pcpbench.targets.builtin import BuiltinTarget

CPU = torch.device("cpu")


class Bench:
    """One scenario, one ladder; `run` judges it after `prepare` had its hands on the stand."""

    def __init__(self, scenario, candidate="full", base="eager", forced=True, **options):
        self.options = EngineOptions(**options)
        self.plan = make_plan(
            load_scenario(scenario),
            vocab_size=model_shape(self.options.preset).vocab_size,
            kv_groups=model_shape(self.options.preset).kv_groups,
            dcp_size=self.options.dcp,
            max_num_seqs=self.options.max_num_seqs,
            num_speculative_tokens=self.options.spec_tokens,
            dynamic_spec=self.options.dynamic_spec,
            num_lookahead_tokens=self.options.num_lookahead_tokens,
        )
        target = BuiltinTarget(CPU, resolve_backend("auto", CPU))
        builder = StandBuilder(target, build_ladder(base, candidate), self.options, "cpu")
        builder.check(self.plan)
        self.stand = builder.stand_for(self.plan)
        self.forced = forced

    def engine(self, label):
        return self.stand.arms[label].engine

    def run(self, repetitions=0, checks="quick"):
        self.trial = Trial(
            self.plan,
            self.stand,
            make_clock(CPU),
            dtype=self.options.dtype,
            teacher_forced=self.forced,
            repetitions=repetitions,
            checks=checks,
        )
        return self.trial.run()


@pytest.fixture
def bench():
    return Bench


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
