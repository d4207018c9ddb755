"""The stand: every arm of a ladder, built for one scenario's limits.

Owns which settings each arm gets and keeps engines for scenarios with equal limits. Knows no
verdict.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from pcpbench.checks.kv import KvArrays
from pcpbench.checks.setup import ArmSetup, DraftSetup, ExpertSetup, Pair
from pcpbench.checks.write_set import Change, changed_by_capture, copy_tables
from pcpbench.config import EngineConfig
from pcpbench.device.memory import memory_errors
from pcpbench.engine_options import EngineOptions, reference_config
from pcpbench.errors import MeasuredFailure
from pcpbench.model.presets import model_shape
from pcpbench.modes import CUDAGraphMode
from pcpbench.plan import ScenarioPlan
from pcpbench.records import IndexTables, Notice
from pcpbench.session.ladder import ArmSpec, Ladder
from pcpbench.targets.protocol import Arm, DraftingArm, Target


@dataclass(frozen=True)
class Stand:
    """Arms by label, in the order in which they run a step, and what the judge must know.

    is_async: whether the device runs behind the host.
    captures: for each arm, what its capture changed that it had to leave alone (contract C9).
    capture_s: for each arm that captures, what that took, warm-ups included.
    broken: arms whose capture failed, which cannot be run, and what failed.
    """

    arms: dict[str, Arm]
    setups: tuple[ArmSetup, ...]
    pairs: tuple[Pair, ...]
    base: str
    candidate: str
    is_async: bool = False
    captures: dict[str, tuple[Change, ...]] = field(default_factory=dict)
    capture_s: dict[str, float] = field(default_factory=dict)
    broken: dict[str, MeasuredFailure] = field(default_factory=dict)

    @property
    def poisoned(self) -> tuple[ArmSetup, ...]:
        """Arms that contract C16 runs over poison: those asked, replays and their padded twins."""
        asked = (self.base, self.candidate)
        return tuple(
            setup
            for setup in self.setups
            if setup.name in asked
            or setup.padded_like is not None
            or setup.mode is not CUDAGraphMode.NONE
        )

    def check(self) -> None:
        """Raise what failed in a capture, for who has no verdict to put it in."""
        for failure in self.broken.values():
            raise failure


class StandBuilder:
    """Builds stands and reuses the one of the last scenario if the limits are the same.

    taps: build arms that keep their intermediate results.
    """

    def __init__(
        self,
        target: Target,
        ladder: Ladder,
        options: EngineOptions,
        device: str,
        taps: bool = False,
    ) -> None:
        self._target, self._ladder, self._taps = target, ladder, taps
        self._options, self._device = options, device
        self._built: dict[EngineConfig, Stand] = {}
        self._notices: dict[Notice, None] = {}

    def config(self, plan: ScenarioPlan, spec: ArmSpec) -> EngineConfig:
        """Settings of one arm for a plan's limits."""
        config = self._options.engine_config(
            spec.mode,
            device=self._device,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            block_size=plan.block_sizes[0] // self._options.dcp,
            num_blocks=plan.num_blocks,
        )
        return reference_config(config, plan.block_sizes) if spec.is_reference else config

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What the arms built so far could not do as asked, each told once."""
        return tuple(self._notices)

    def check(self, plan: ScenarioPlan) -> None:
        """Raise UsageError for settings that one of the arms would refuse."""
        for spec in self._ladder.arms:
            self._target.check(self.config(plan, spec))

    def stand_for(self, plan: ScenarioPlan) -> Stand:
        """The stand for a plan; captures its graphs if it is new.

        Raises NoMemory where there is too little for its arms or for the copies of their caches.
        """
        key = self.config(plan, self._ladder.arms[-1])
        if key not in self._built:
            self._built.clear()  # at most one stand's caches at a time
            with memory_errors():
                self._built[key] = self._build(plan)
        return self._built[key]

    def forget(self) -> None:
        """Build anew for the next plan, whatever its limits are."""
        self._built.clear()

    def _build(self, plan: ScenarioPlan) -> Stand:
        arms: dict[str, Arm] = {}
        setups: list[ArmSetup] = []
        captures, capture_s, broken = {}, {}, {}
        for spec in self._ladder.arms:
            config = self.config(plan, spec)
            arm = self._target.build(spec.label, config, replays=spec.replays, taps=self._taps)
            try:
                captures[spec.label], seconds = _capture(arm)
            except MeasuredFailure as failure:
                broken[spec.label] = failure
            else:
                if arm.captured:
                    capture_s[spec.label] = seconds
            arms[spec.label] = arm
            if self._options.requested_sizes is not None:  # default sizes need no excuse
                self._notices.update(dict.fromkeys(arm.notices))
            tables = setups[0].index_tables if setups else arm.index_tables()
            setups.append(_setup(spec, config, arm, tables))
        pairs = tuple(Pair(kind=p.kind, arm=p.arm, twin=p.twin) for p in self._ladder.pairs)
        is_async = torch.device(self._device).type != "cpu"
        ladder = self._ladder
        asked = (ladder.base, ladder.candidate)
        return Stand(arms, tuple(setups), pairs, *asked, is_async, captures, capture_s, broken)


def _capture(arm: Arm) -> tuple[tuple[Change, ...], float]:
    """Capture; what changed outside the null block, and the seconds that capturing took."""
    kv = [[cache.copy() for cache in layers] for layers in arm.kv_caches()]
    tables = copy_tables(arm.block_tables())
    start = time.perf_counter()
    arm.capture()
    seconds = time.perf_counter() - start
    after = kv_view(arm)
    before = KvArrays(kv, arm.kv_groups, arm.num_layers, _num_draft_caches(arm))
    changes = changed_by_capture(before, after, tables, arm.block_tables())
    return tuple(changes), seconds


def kv_view(arm: Arm) -> KvArrays:
    """An arm's caches as they are now."""
    return KvArrays(arm.kv_caches(), arm.kv_groups, arm.num_layers, _num_draft_caches(arm))


def _num_draft_caches(arm: Arm) -> int:
    return arm.num_draft_caches if isinstance(arm, DraftingArm) else 0


def _setup(
    spec: ArmSpec, config: EngineConfig, arm: Arm, index_tables: IndexTables | None
) -> ArmSetup:
    """index_tables: the first arm's: all arms have the same model."""
    padded = spec.mode is not CUDAGraphMode.NONE and not spec.replays
    parallel = config.parallel_config
    groups = model_shape(config.model_config.preset).kv_groups
    thresholds = (parallel.dbo_decode_token_threshold, parallel.dbo_prefill_token_threshold)
    return ArmSetup(
        name=spec.label,
        world=config.parallel_config.world,
        interleave=config.parallel_config.cp_kv_cache_interleave_size,
        mode=CUDAGraphMode.NONE if padded else spec.mode,
        candidates=arm.candidates,
        padded_like=spec.padded_like,
        descriptor_mode=spec.mode,
        capture_sizes=config.compilation_config.cudagraph_capture_sizes,
        captured=arm.captured if spec.replays else None,
        decode_query_len=config.decode_query_len,
        has_dynamic_drafts=config.has_dynamic_drafts,
        max_model_len=config.model_config.max_model_len,
        sharded_groups=tuple(group.dcp_sharded for group in groups),
        ubatch_thresholds=thresholds if parallel.enable_dbo else None,
        index_tables=index_tables,
        experts=_experts(config),
        traits=arm.traits,
        draft=_draft(config, arm, replays=spec.replays),
    )


def _draft(config: EngineConfig, arm: Arm, *, replays: bool) -> DraftSetup | None:
    if not config.has_draft_model:
        return None
    captured = arm.draft_captured if replays and isinstance(arm, DraftingArm) else None
    scheduler = config.scheduler_config
    return DraftSetup(
        num_steps=config.num_speculative_tokens,
        max_num_reqs=min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
        captured=captured,
    )


def _experts(config: EngineConfig) -> ExpertSetup | None:
    shape, parallel = model_shape(config.model_config.preset), config.parallel_config
    if not shape.moe_layers:
        return None
    return ExpertSetup(
        num_experts=shape.n_routed_experts,
        top_k=shape.num_experts_per_tok,
        layers=shape.moe_layers,
        backend=parallel.all2all_backend if parallel.enable_expert_parallel else None,
    )
