"""The vLLM target: the installed vLLM's worker classes on the stand. Owns its refusals."""

from __future__ import annotations

import torch

from pcpbench.config import EngineConfig
from pcpbench.device.graph import GraphBackend
from pcpbench.device.memory import memory_errors
from pcpbench.errors import UsageError
from pcpbench.plan import ScenarioPlan
from pcpbench.records import Notice
from pcpbench.targets.builtin import BuiltinArm, BuiltinTarget
from pcpbench.targets.vllm import host
from pcpbench.targets.vllm.api import VllmApi, vllm_api
from pcpbench.targets.vllm.engine import VllmEngine
from pcpbench.targets.vllm.orders import arrange
from pcpbench.targets.vllm.settings import vllm_config
from pcpbench.traits import Traits
from pcpbench.vllm_options import check_vllm_options

TRAITS = Traits(
    counts_whole_batch=True,
    idle_has_context=False,
    stale_padding_without_pcp=True,
    short_prefill_is_decode_without_pcp=True,
    given_back_in_tables_under_dcp=True,
    notices=(
        Notice(
            setting="target",
            message="vLLM hands dispatch the request count of the whole batch next to a rank's "
            "token count: C10 holds it to the largest rank's in decode steps of arms with FULL "
            "graphs, where a graph depends on it, and nowhere else.",
        ),
    ),
    notices_without_pcp=(
        Notice(
            setting="target",
            message="without PCP vLLM leaves ids and positions of padding tokens as earlier steps "
            "wrote them, where pcpbench's are 0: C3 looks at their flags only. That nothing reads "
            "them is what --check full shows (C16).",
        ),
        Notice(
            setting="target",
            message="without PCP vLLM dispatches a prefill of one token behind a context like a "
            "decode, where pcpbench's is a prefill to its end: C10 takes the smallest graph that "
            "covers such a step as decodes, and no other.",
        ),
    ),
    notices_with_dcp=(
        Notice(
            setting="target",
            message="vLLM's idle steps have no dummy context under DCP, where pcpbench's have "
            "some: C1 and C6 expect none.",
        ),
    ),
    notices_with_dcp_and_window=(
        Notice(
            setting="target",
            message="under DCP vLLM leaves the ids of blocks that a request has given back in its "
            "table, in columns wholly before its sliding window, where pcpbench's are 0: C5 takes "
            "these ids, and no others. That nothing reads them is what --check full shows (C16).",
        ),
    ),
)


class VllmTarget(BuiltinTarget):
    """Builds arms over the installed vLLM.

    Raises CannotMeasure where there is none to drive, UsageError for a CPU beside an accelerator.
    """

    name = "vllm"

    def __init__(self, device: torch.device, backend: GraphBackend) -> None:
        super().__init__(device, backend)
        if device.type == "cpu" and host.has_accelerator():
            raise UsageError(
                "--device is cpu, and with an accelerator in sight vLLM's kernels are compiled for "
                "that: use --device cuda, or set CUDA_VISIBLE_DEVICES= (to nothing), which has "
                "them run in Triton's interpreter."
            )
        self.api: VllmApi = vllm_api()
        self.version = self.api.version
        self.traits = TRAITS

    def check(self, config: EngineConfig) -> None:
        """Raise UsageError for settings that the stand or vLLM itself refuses."""
        super().check(config)
        check_vllm_options(
            microbatch=config.parallel_config.enable_dbo,
            draft_model=config.has_draft_model,
            dynamic_spec=config.has_dynamic_drafts,
        )
        if config.parallel_config.world.shard_decode_requests and not self.api.shards_decodes:
            raise UsageError(
                f"--pcp {config.parallel_config.prefill_context_parallel_size} with --dcp 1: in "
                f"vllm {self.api.version} every rank runs every decode there, and the contracts "
                "are about decodes that one rank runs: set --dcp, too, or install vllm 0.32 or "
                "newer."
            )
        settings = vllm_config(self.api, config)
        try:
            self.api.PCPManager.validate_config(settings, False)
        except NotImplementedError as error:
            raise UsageError(f"vllm {self.api.version} refuses this: {error}") from error

    def arrange(self, plan: ScenarioPlan, query_len: int) -> ScenarioPlan:
        """The plan with each step's requests in the order of vLLM's batches."""
        return arrange(self.api, plan, query_len)

    def build(
        self, label: str, config: EngineConfig, *, replays: bool, taps: bool = False
    ) -> BuiltinArm:
        """An arm on vLLM's state."""
        backend = self._backend if replays else None
        with memory_errors():
            engine = VllmEngine(self.api, config, self._device, backend, taps)
        return BuiltinArm(label, engine, self.traits)
