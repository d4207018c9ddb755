"""The stand: every arm of a ladder, built for one scenario's limits.

Owns which settings each arm gets and keeps engines for scenarios with equal limits. Knows no verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

from pcpbench.checks.setup import ArmSetup, Pair
from pcpbench.config import EngineConfig
from pcpbench.modes import CUDAGraphMode
from pcpbench.plan import ScenarioPlan
from pcpbench.records import Notice
from pcpbench.request import EngineOptions, reference_config
from pcpbench.scenarios.schema import Limits
from pcpbench.session.ladder import ArmSpec, Ladder
from pcpbench.targets.protocol import Arm, Target


@dataclass(frozen=True)
class Stand:
    """Arms by label, in the order in which they run a step, and what the judge must know of them."""

    arms: dict[str, Arm]
    setups: tuple[ArmSetup, ...]
    pairs: tuple[Pair, ...]
    base: str
    candidate: str

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What the arms could not do as asked, each told once."""
        found = {notice: None for arm in self.arms.values() for notice in arm.notices}
        return tuple(found)


class StandBuilder:
    """Builds stands and reuses the one of the last scenario if the limits are the same."""

    def __init__(
        self, target: Target, ladder: Ladder, options: EngineOptions, device: str
    ) -> None:
        self._target, self._ladder = target, ladder
        self._options, self._device = options, device
        self._built: dict[EngineConfig, Stand] = {}

    def config(self, plan: ScenarioPlan, block_size: int, mode: CUDAGraphMode) -> EngineConfig:
        """Settings of a context-parallel arm for a plan's limits."""
        return self._options.engine_config(
            mode,
            device=self._device,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            block_size=block_size,
            num_blocks=plan.num_blocks,
        )

    def stand_for(self, plan: ScenarioPlan, limits: Limits) -> Stand:
        """The stand for a plan; captures its graphs if it is new."""
        key = self.config(plan, limits.block_size, CUDAGraphMode.NONE)
        if key not in self._built:
            self._built.clear()  # at most one stand's caches at a time
            self._built[key] = self._build(plan, limits.block_size)
        return self._built[key]

    def _build(self, plan: ScenarioPlan, block_size: int) -> Stand:
        arms: dict[str, Arm] = {}
        setups = []
        for spec in self._ladder.arms:
            config = self.config(plan, block_size, spec.mode)
            if spec.is_reference:
                config = reference_config(config)
            arm = self._target.build(spec.label, config, replays=spec.replays)
            arm.capture()
            arms[spec.label] = arm
            setups.append(_setup(spec, config, arm))
        pairs = tuple(Pair(kind=p.kind, arm=p.arm, twin=p.twin) for p in self._ladder.pairs)
        return Stand(arms, tuple(setups), pairs, self._ladder.base, self._ladder.candidate)


def _setup(spec: ArmSpec, config: EngineConfig, arm: Arm) -> ArmSetup:
    padded = spec.mode is not CUDAGraphMode.NONE and not spec.replays
    return ArmSetup(
        name=spec.label,
        world=config.parallel_config.world,
        interleave=config.parallel_config.cp_kv_cache_interleave_size,
        mode=CUDAGraphMode.NONE if padded else spec.mode,
        candidates=arm.candidates,
        padded_like=spec.padded_like,
    )
