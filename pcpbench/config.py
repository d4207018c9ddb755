"""Settings of one engine, resolved once and then frozen. Field names are vLLM's.

Owns: what an engine can be told and the checks that need nothing but the settings. The layout
(`parallel_config.prefill_context_parallel_size` and so on) is the one that vLLM code reads, so that
an `EngineConfig` can stand where upstream code expects its own configuration. Knows no device.
"""

from __future__ import annotations

import msgspec

from pcpbench.errors import UsageError
from pcpbench.modes import CUDAGraphMode
from pcpbench.world import World

DTYPES = ("float32", "bfloat16", "float16")
PRESETS = (
    "tiny", "tiny-swa", "small", "v2-lite-layer", "tiny-sparse", "tiny-moe", "tiny-sparse-moe",
)  # fmt: skip
DCP_BACKENDS = ("ag_rs", "a2a")
ALL2ALL_BACKENDS = ("allgather_reducescatter", "all_to_all")
MAX_SPECULATIVE_TOKENS = 16
MAX_DIGITS = 20
"""Of a whole number that somebody types: Python refuses to read far longer ones."""
DYNAMIC_SPEC = ("off", "step", "request")
DRAFT_MODELS = ("planned", "mtp")
DEFAULT_CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the parallel dimensions (SPEC 2) and how KV positions are dealt out (SPEC 7).

    dcp_comm_backend: how partial attention is merged over a DCP group (SPEC 9): `ag_rs` gathers
    LSEs and reduce-scatters outputs, `a2a` exchanges partial outputs with their LSEs.
    enable_expert_parallel: deal out whole experts over all ranks; otherwise TP divides each one.
    all2all_backend: how rows then get to their experts, one of ALL2ALL_BACKENDS.
    enable_dbo: cut steps into two microbatches (SPEC 8). The thresholds are the fewest rank-local
    tokens of a step that is cut, of one without and one with a prefill.
    """

    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    dcp_comm_backend: str = "ag_rs"
    enable_expert_parallel: bool = False
    all2all_backend: str = ALL2ALL_BACKENDS[0]
    enable_dbo: bool = False
    dbo_decode_token_threshold: int = 2
    dbo_prefill_token_threshold: int = 4

    @property
    def num_ubatches(self) -> int:
        """Microbatches of a step that is cut; 1 where none is."""
        return 2 if self.enable_dbo else 1

    def num_ubatches_for(self, num_tokens: int, has_prefill: bool) -> int:
        """Microbatches of a step with this many tokens (the largest PCP rank's, unpadded).

        With the thresholds 2 and 4 a step of 3 decodes is cut, and a prefill of 3 tokens is not.
        """
        decode, prefill = self.dbo_decode_token_threshold, self.dbo_prefill_token_threshold
        return self.num_ubatches if num_tokens >= (prefill if has_prefill else decode) else 1

    @property
    def world(self) -> World:
        """The ranks; raises UsageError for sizes that cannot form groups."""
        return World(
            pcp_size=self.prefill_context_parallel_size,
            tp_size=self.tensor_parallel_size,
            dcp_size=self.decode_context_parallel_size,
        )

    @property
    def pcp_shard_decode_requests(self) -> bool:
        """Whether each decode request has one owner rank a step (PCP without DCP)."""
        return self.world.shard_decode_requests


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which decoder to build and how."""

    preset: str = "tiny"
    dtype: str = "float32"
    seed: int = 0
    max_model_len: int = 256
    use_mla: bool = True
    is_sparse: bool = False
    is_encoder_decoder: bool = False
    model_type: str = "deepseek_v2"


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache. One block of a DCP group stands for block_size x dcp positions.

    group_block_sizes: slots of a block in each KV group, where they differ: a rank that stands for
    a whole DCP group holds block_size x dcp positions in the blocks of the sharded ones.
    """

    block_size: int = 16
    num_gpu_blocks: int = 256
    group_block_sizes: tuple[int, ...] = ()

    def block_sizes(self, num_groups: int) -> list[int]:
        """Slots of a block on this rank, one entry a KV group."""
        return list(self.group_block_sizes) or [self.block_size] * num_groups


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one step."""

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64


class CompilationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which graphs to capture."""

    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE
    cudagraph_capture_sizes: tuple[int, ...] = DEFAULT_CAPTURE_SIZES

    @property
    def max_cudagraph_capture_size(self) -> int:
        """The largest capture size; 0 when nothing is captured."""
        return max(self.cudagraph_capture_sizes, default=0)


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding as far as a start-up check needs to know it.

    dynamic: whether decodes verify fewer drafts than num_speculative_tokens: `off`, as many for all
    in a `step`, or each `request` its own number. draft_model: whether drafts are only `planned`,
    or an `mtp` module proposes drafts after each step as well.
    """

    method: str = "mtp"
    num_speculative_tokens: int = 1
    use_multi_module_mtp: bool = False
    draft_uses_mla: bool = True
    dynamic: str = "off"
    draft_model: str = DRAFT_MODELS[0]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one engine (one arm of a comparison)."""

    parallel_config: ParallelConfig = ParallelConfig()
    model_config: ModelConfig = ModelConfig()
    cache_config: CacheConfig = CacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    compilation_config: CompilationConfig = CompilationConfig()
    speculative_config: SpeculativeConfig | None = None
    lora_config: str | None = None
    device: str = "cpu"

    @property
    def num_speculative_tokens(self) -> int:
        """Draft tokens a decode step verifies; 0 without speculative decoding."""
        spec = self.speculative_config
        return 0 if spec is None else spec.num_speculative_tokens

    @property
    def decode_query_len(self) -> int:
        """Query tokens of one decode request: the sampled token and the drafts."""
        return 1 + self.num_speculative_tokens

    @property
    def has_dynamic_drafts(self) -> bool:
        """Whether decodes may verify fewer draft tokens than num_speculative_tokens."""
        return self.speculative_config is not None and self.speculative_config.dynamic != "off"

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft model runs after the target model in each step."""
        spec = self.speculative_config
        return spec is not None and spec.draft_model != DRAFT_MODELS[0]

    def check(self) -> None:
        """Raise UsageError for settings that no engine could run, whatever its graph mode."""
        parallel, cache = self.parallel_config, self.cache_config
        world = parallel.world
        interleave = parallel.cp_kv_cache_interleave_size
        if interleave < 1:
            raise UsageError(f"--interleave is {interleave}: it must be a whole number from 1 up.")
        if cache.block_size % interleave:
            raise UsageError(
                f"--interleave is {interleave}, which does not divide the block size "
                f"{cache.block_size}: use one of {_divisors(cache.block_size)}."
            )
        _check_thresholds(parallel)
        _check_backends(parallel)
        if interleave > 1 and world.dcp_size == 1 and world.pcp_size == 1:
            raise UsageError(
                f"--interleave is {interleave}, but nothing is interleaved without context "
                "parallelism: set --dcp above 1, or leave --interleave at 1."
            )
        if self.model_config.dtype not in DTYPES:
            raise UsageError(
                f"--dtype is {self.model_config.dtype!r}: use one of {', '.join(DTYPES)}."
            )
        if self.model_config.preset not in PRESETS:
            raise UsageError(
                f"--model is {self.model_config.preset!r}: use one of {', '.join(PRESETS)}."
            )
        limit = self.scheduler_config.max_num_batched_tokens
        if self.decode_query_len > limit:
            raise UsageError(
                f"--spec-tokens is {self.num_speculative_tokens}: a decode of "
                f"{self.decode_query_len} tokens does not fit a step of {limit}."
            )
        for size in self.compilation_config.cudagraph_capture_sizes:
            if size < 1:
                raise UsageError(
                    f"--capture-sizes holds {size}: each size must be a whole number from 1 up."
                )


def _check_backends(parallel: ParallelConfig) -> None:
    for flag, value, known in (
        ("--dcp-backend", parallel.dcp_comm_backend, DCP_BACKENDS),
        ("--all2all-backend", parallel.all2all_backend, ALL2ALL_BACKENDS),
    ):
        if value not in known:
            raise UsageError(f"{flag} is {value!r}: use one of {', '.join(known)}.")


def _check_thresholds(parallel: ParallelConfig) -> None:
    for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
        if getattr(parallel, name) < 2:
            raise UsageError(
                f"{name} is {getattr(parallel, name)}: a step of one token cannot be cut in "
                "two, so use a whole number from 2 up."
            )


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
