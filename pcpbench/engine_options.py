"""Settings of an engine as the command line has them, checked, and the configuration behind them.

Owns parsing and checking of options that need no device. Knows no engine and imports no torch.
"""

from __future__ import annotations

import msgspec

from pcpbench.config import (
    ALL2ALL_BACKENDS,
    DCP_BACKENDS,
    DEFAULT_CAPTURE_SIZES,
    DRAFT_MODELS,
    DTYPES,
    DYNAMIC_SPEC,
    MAX_DIGITS,
    MAX_SPECULATIVE_TOKENS,
    PRESETS,
    CacheConfig,
    CompilationConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pcpbench.errors import UsageError
from pcpbench.model.presets import MODEL_SHAPES
from pcpbench.modes import CUDAGraphMode
from pcpbench.vllm_options import check_vllm_options

AUTO = "auto"
"""The model that the parallel sizes call for."""

LAUNCHERS = ("inproc",)
PREPARING_TARGETS = ("builtin", "vllm")
"""Whose steps are prepared in this process, part by part."""
TARGETS = (*PREPARING_TARGETS, "engine")
MAX_CAPTURE_SIZE = 2**20


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that every command which builds engines shares, as they were typed."""

    pcp: int = 2
    dcp: int = 1
    tp: int = 1
    interleave: int = 1
    dcp_backend: str = "ag_rs"
    model: str = AUTO
    dtype: str = "float32"
    capture_sizes: str | None = None
    max_num_seqs: int | None = None
    device: str = "auto"
    backend: str = "auto"
    launcher: str = "inproc"
    seed: int = 0
    spec_tokens: int = 0
    microbatch: bool = False
    expert_parallel: bool = False
    all2all_backend: str | None = None
    dynamic_spec: str = "off"
    draft_model: str = DRAFT_MODELS[0]
    target: str = "builtin"

    @property
    def words(self) -> tuple[str, ...]:
        """The command line of those that are not as by default: `--tp`, `2`, `--microbatch`."""
        told: list[str] = []
        for name, default in msgspec.structs.asdict(EngineOptions()).items():
            value = getattr(self, name)
            if value != default:
                flag = f"--{name.replace('_', '-')}"
                told += [flag] if value is True else [flag, str(value)]
        return tuple(told)

    def check(self) -> None:
        """Raise UsageError for options that are wrong whatever the scenario is."""
        self.parallel_config.world  # noqa: B018 - raises for sizes that no world has
        if self.launcher not in LAUNCHERS:
            raise UsageError(f"--launcher is {self.launcher!r}: use {' or '.join(LAUNCHERS)}.")
        self._check_target()
        one_of("--model", self.model, (AUTO, *PRESETS))
        if self.pcp > 1 and self.dcp > 1 and not MODEL_SHAPES[self.preset].is_sparse:
            sparse = [name for name, shape in MODEL_SHAPES.items() if shape.is_sparse]
            raise UsageError(
                f"--model is {self.model!r} with --pcp {self.pcp} and --dcp {self.dcp}: its dense "
                "latent attention would have the ranks gather unequal amounts: use --model "
                f"{' or '.join(sparse)}, or --dcp 1."
            )
        one_of("--dcp-backend", self.dcp_backend, DCP_BACKENDS)
        if self.pcp > 1 and self.dcp > 1 and self.dcp_backend != "ag_rs":
            raise UsageError(
                f"--dcp-backend is {self.dcp_backend!r} with --pcp {self.pcp} and --dcp "
                f"{self.dcp}: both together are built for gather and reduce-scatter only: use "
                "ag_rs, or --pcp 1."
            )
        MODEL_SHAPES[self.preset].check_tp(self.tp)
        one_of("--dtype", self.dtype, DTYPES)
        if self.interleave < 1:
            raise UsageError(
                f"--interleave is {self.interleave}: it must be a whole number from 1 up."
            )
        self._check_experts()
        if self.max_num_seqs is not None and not 1 <= self.max_num_seqs <= 4096:
            raise UsageError(f"--max-num-seqs is {self.max_num_seqs}: use 1 to 4096.")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}: use a whole number from 0 to 2^63 - 1.")
        if not 0 <= self.spec_tokens <= MAX_SPECULATIVE_TOKENS:
            raise UsageError(
                f"--spec-tokens is {self.spec_tokens}: use 0 to {MAX_SPECULATIVE_TOKENS} draft "
                "tokens a decode."
            )
        one_of("--dynamic-spec", self.dynamic_spec, DYNAMIC_SPEC)
        if self.dynamic_spec != "off" and not self.spec_tokens:
            raise UsageError(
                f"--dynamic-spec is {self.dynamic_spec} without draft tokens: set --spec-tokens to "
                "the most that a decode verifies, or leave --dynamic-spec out."
            )
        self._check_draft_model()
        self.requested_sizes  # noqa: B018 - raises for sizes that cannot be read

    def _check_target(self) -> None:
        one_of("--target", self.target, TARGETS)
        if self.target == "vllm":
            check_vllm_options(
                microbatch=self.microbatch,
                draft_model=self.draft_model != DRAFT_MODELS[0],
                dynamic_spec=self.dynamic_spec != DYNAMIC_SPEC[0],
            )

    def _check_draft_model(self) -> None:
        one_of("--draft-model", self.draft_model, DRAFT_MODELS)
        if self.draft_model == DRAFT_MODELS[0]:
            return
        told = f"--draft-model is {self.draft_model}"
        if not self.spec_tokens:
            raise UsageError(
                f"{told} without draft tokens: set --spec-tokens to how many it proposes."
            )
        if self.microbatch:
            raise UsageError(
                f"{told} with --microbatch: its passes run on whole batches, its first one on the "
                "target's, which would be cut: leave one of the two out."
            )
        if len(MODEL_SHAPES[self.preset].kv_groups) > 1:
            one = [name for name, shape in MODEL_SHAPES.items() if len(shape.kv_groups) == 1]
            raise UsageError(
                f"{told} with --model {self.preset}, which has several KV groups: its layer shares "
                f"the tables of a model's only one: use {', '.join(one)}."
            )

    def _check_experts(self) -> None:
        if self.all2all_backend is None:
            return
        one_of("--all2all-backend", self.all2all_backend, ALL2ALL_BACKENDS)
        if not self.expert_parallel:
            raise UsageError(
                f"--all2all-backend is {self.all2all_backend}, but no rows go to experts on "
                "other ranks: set --expert-parallel, too, or leave it out."
            )

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions behind a step's that its draft model writes: one a pass but the first."""
        return 0 if self.draft_model == DRAFT_MODELS[0] else self.spec_tokens - 1

    @property
    def preset(self) -> str:
        """The model: the one named, or the default for these sizes."""
        if self.model != AUTO:
            return self.model
        return "tiny-sparse" if self.pcp > 1 and self.dcp > 1 else "tiny"

    @property
    def parallel_config(self) -> ParallelConfig:
        """The parallel settings."""
        return ParallelConfig(
            prefill_context_parallel_size=self.pcp,
            decode_context_parallel_size=self.dcp,
            tensor_parallel_size=self.tp,
            cp_kv_cache_interleave_size=self.interleave,
            dcp_comm_backend=self.dcp_backend,
            enable_dbo=self.microbatch,
            enable_expert_parallel=self.expert_parallel,
            all2all_backend=self.all2all_backend or ALL2ALL_BACKENDS[0],
        )

    @property
    def requested_sizes(self) -> tuple[int, ...] | None:
        """The capture sizes asked for, None if none were; raises UsageError for a bad list."""
        if self.capture_sizes is None:
            return None
        sizes = []
        for part in self.capture_sizes.split(","):
            text = part.strip()
            is_number = text.isascii() and text.isdigit() and len(text) < MAX_DIGITS
            if not is_number or not 1 <= int(text) <= MAX_CAPTURE_SIZE:
                raise UsageError(
                    f"--capture-sizes is {self.capture_sizes!r}, of which {text!r} is no size: "
                    f"use whole numbers from 1 to {MAX_CAPTURE_SIZE} with commas between them, "
                    "such as 1,2,4,8."
                )
            sizes.append(int(text))
        return tuple(sizes)

    def engine_config(
        self,
        mode: CUDAGraphMode,
        *,
        device: str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
    ) -> EngineConfig:
        """The settings of one context-parallel engine under a scenario's limits.

        Sizes that were asked for are taken as they are (those that cannot be used become notices of
        the dispatcher's candidates); the default ones are those that the limits leave room for.
        """
        sizes = self.requested_sizes
        if sizes is None:
            sizes = default_capture_sizes(
                mode, max_num_seqs, max_num_batched_tokens, 1 + self.spec_tokens
            )
        speculative = None
        if self.spec_tokens:
            speculative = SpeculativeConfig(
                num_speculative_tokens=self.spec_tokens,
                dynamic=self.dynamic_spec,
                draft_model=self.draft_model,
            )
        return EngineConfig(
            parallel_config=self.parallel_config,
            model_config=ModelConfig(
                preset=self.preset,
                dtype=self.dtype,
                seed=self.seed,
                max_model_len=max_model_len,
                is_sparse=MODEL_SHAPES[self.preset].is_sparse,
                model_type=MODEL_SHAPES[self.preset].model_type,
            ),
            cache_config=CacheConfig(block_size=block_size, num_gpu_blocks=num_blocks),
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
            ),
            compilation_config=CompilationConfig(
                cudagraph_mode=mode, cudagraph_capture_sizes=sizes
            ),
            speculative_config=speculative,
            device=device,
        )


def default_capture_sizes(
    mode: CUDAGraphMode, max_num_seqs: int, max_num_batched_tokens: int, query_len: int = 1
) -> tuple[int, ...]:
    """Sizes to capture when none are named: up to the largest decode batch or the token budget.

    With 16 requests and 64 tokens, decode graphs get 1, 2, 4, 8, 16 and PIECEWISE ones go on to 64.
    All are multiples of query_len, the tokens of a decode: with two drafts 3, 6, 12, 24, 48. For
    PIECEWISE graphs the token budget, 64, is among them all the same.
    """
    piecewise = mode.mixed_mode() is not CUDAGraphMode.NONE
    room = max_num_batched_tokens // query_len
    limit = room if piecewise else min(max_num_seqs, room)
    sizes = {size for size in DEFAULT_CAPTURE_SIZES if size <= limit}
    tokens = {query_len * size for size in sizes}
    if limit <= DEFAULT_CAPTURE_SIZES[-1]:
        tokens |= {query_len * limit, max_num_batched_tokens if piecewise else query_len * limit}
    return tuple(sorted(tokens))


def reference_config(config: EngineConfig, block_sizes: tuple[int, ...] = ()) -> EngineConfig:
    """The same model on one rank, eager; a block stands for as many positions as under DCP.

    block_sizes: positions of a block in each KV group, where there are several.
    """
    world, cache = config.parallel_config.world, config.cache_config
    return msgspec.structs.replace(
        config,
        parallel_config=ParallelConfig(),
        compilation_config=CompilationConfig(
            cudagraph_capture_sizes=config.compilation_config.cudagraph_capture_sizes
        ),
        cache_config=msgspec.structs.replace(
            cache,
            block_size=cache.block_size * world.dcp_size,
            group_block_sizes=block_sizes if len(block_sizes) > 1 else (),
        ),
    )


def one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise UsageError for a value of this flag that is not among those allowed."""
    if value not in allowed:
        raise UsageError(f"{flag} is {value!r}: use one of {', '.join(allowed)}.")
