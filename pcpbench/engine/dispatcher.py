"""Which captured shape a batch runs as (SPEC 3). Counts and descriptors only; no tensor, no graph.

Owns the candidate descriptors of a configuration and the choice among them, with the reason when
a batch does not get a FULL graph. The counts it is given are rank-local: the largest row count and
the largest token count over the PCP ranks, so that all ranks choose the same descriptor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.records import Notice

FULL_RANK = {CUDAGraphMode.FULL: 0, CUDAGraphMode.PIECEWISE: 1}


@dataclass(frozen=True)
class Candidates:
    """Descriptors worth capturing, in capture order, and the sizes that had to be left out.

    descriptors: PIECEWISE before FULL and larger before smaller, so that the pool is reused.
    notices: one for each capture size that cannot be used as asked.
    """

    descriptors: tuple[BatchExecutionDescriptor, ...]
    notices: tuple[Notice, ...]


@dataclass(frozen=True)
class BatchCounts:
    """What dispatch may know of a batch (largest rank-local counts over the PCP ranks).

    uniform_token_count: tokens of every request if all have the same and none is prefilling.
    has_prefill: of the global batch. max_query_len: longest query. num_ubatches: microbatches
    that a step of these counts is cut into.
    """

    num_reqs: int
    num_tokens: int
    uniform_token_count: int | None
    has_prefill: bool
    max_query_len: int | None = None
    num_ubatches: int = 1


@dataclass(frozen=True)
class Decision:
    """The descriptor a batch runs as, and why it is not FULL ("" when it is or none was asked)."""

    descriptor: BatchExecutionDescriptor
    miss_reason: str = ""


def build_candidates(
    mode: CUDAGraphMode,
    capture_sizes: Sequence[int],
    *,
    decode_query_len: int,
    max_num_seqs: int,
    max_num_tokens: int,
    dynamic_drafts: bool = False,
) -> Candidates:
    """Descriptors for every capture size (SPEC 3).

    A FULL decode descriptor has its tokens rounded up to a multiple of the decode query length:
    size 4 with query length 3 becomes 6 tokens, 2 requests, provided 6 is not past the largest
    size that a step has room for. Sizes past max_num_seqs requests or past max_num_tokens are left
    out with a notice.
    dynamic_drafts: decodes may have fewer tokens. Each size is then captured for all query lengths,
    and once more for queries of any length up to the longest. Sizes that have no room for one of
    the shorter ones are left out without a notice.
    """
    sizes = sorted(set(capture_sizes))
    largest = max((size for size in sizes if size <= max_num_tokens), default=0)
    descriptors: dict[BatchExecutionDescriptor, None] = {}
    notices: list[Notice] = []
    for size in sizes:
        if size > max_num_tokens:
            notices.append(_unusable(size, f"a step holds at most {max_num_tokens} tokens"))
            continue
        mixed = _mixed_descriptor(mode, size, max_num_seqs)
        if mixed is not None:
            descriptors[mixed] = None
        if not mode.separate_routine or mode.decode_mode() is not CUDAGraphMode.FULL:
            continue
        tokens = -(-size // decode_query_len) * decode_query_len
        num_reqs = tokens // decode_query_len
        if tokens > largest:
            why = f"no multiple of the decode query length {decode_query_len} fits below the limit"
            notices.append(_unusable(size, why))
        elif num_reqs > max_num_seqs:
            why = f"{num_reqs} decodes are more than --max-num-seqs {max_num_seqs}"
            notices.append(_unusable(size, why + (" (kept for PIECEWISE)" if mixed else "")))
        else:
            if tokens != size:
                notices.append(
                    Notice(
                        setting="capture_sizes",
                        message=f"capture size {size} is not a multiple of the decode query "
                        f"length {decode_query_len}: captured as {tokens} tokens.",
                    )
                )
            full = BatchExecutionDescriptor(CUDAGraphMode.FULL, tokens, num_reqs, decode_query_len)
            descriptors[full] = None
        if dynamic_drafts:
            more = _dynamic_descriptors(size, decode_query_len, max_num_seqs, largest)
            descriptors.update(dict.fromkeys(more))
    ordered = sorted(descriptors, key=lambda d: (-FULL_RANK[d.cg_mode], -d.num_tokens))
    return Candidates(tuple(ordered), tuple(notices))


def _mixed_descriptor(
    mode: CUDAGraphMode, size: int, max_num_seqs: int
) -> BatchExecutionDescriptor | None:
    if mode.mixed_mode() is CUDAGraphMode.PIECEWISE:
        return BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, size, None)
    if mode.mixed_mode() is CUDAGraphMode.FULL:
        return BatchExecutionDescriptor(CUDAGraphMode.FULL, size, min(size, max_num_seqs))
    return None


def _dynamic_descriptors(
    size: int, longest: int, max_num_seqs: int, limit: int
) -> Iterator[BatchExecutionDescriptor]:
    """FULL graphs of the shorter query lengths, then the varlen one, which needs no rounding.

    Size 8 with queries of at most 4 and 16 requests: 9 tokens in 3 requests, 8 in 4, 8 in 8; varlen
    8 in 8.
    """
    for length in range(longest - 1, 0, -1):
        num_reqs = -(-size // length)
        if num_reqs * length <= limit and num_reqs <= max_num_seqs:
            yield BatchExecutionDescriptor(
                CUDAGraphMode.FULL, num_reqs * length, num_reqs, uniform_token_count=length
            )
    if size <= max_num_seqs * longest:
        num_reqs = min(size, max_num_seqs)
        yield BatchExecutionDescriptor(CUDAGraphMode.FULL, size, num_reqs, max_query_len=longest)


def _unusable(size: int, why: str) -> Notice:
    return Notice(setting="capture_sizes", message=f"capture size {size} is not used: {why}.")


class Dispatcher:
    """Chooses the smallest covering descriptor: FULL before PIECEWISE before NONE."""

    def __init__(
        self, mode: CUDAGraphMode, descriptors: Sequence[BatchExecutionDescriptor]
    ) -> None:
        self.mode = mode
        self.descriptors = sorted(descriptors, key=_preference)

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int = 0,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> BatchExecutionDescriptor:
        """The smallest captured descriptor that covers the counts, or a NONE descriptor."""
        for descriptor in self.descriptors:
            if (
                covers(descriptor, num_reqs, num_tokens, uniform_token_count, max_query_len)
                and descriptor.num_active_loras == num_active_loras
                and descriptor.num_ubatches == num_ubatches
            ):
                return descriptor
        return BatchExecutionDescriptor(
            CUDAGraphMode.NONE, num_tokens, num_reqs, num_ubatches=num_ubatches
        )

    def decide(self, counts: BatchCounts) -> Decision:
        """Dispatch one batch and say why it missed FULL, if it did."""
        descriptor = self.dispatch(
            counts.num_reqs,
            counts.num_tokens,
            None if counts.has_prefill else counts.uniform_token_count,
            max_query_len=None if counts.has_prefill else counts.max_query_len,
            num_ubatches=counts.num_ubatches,
        )
        return Decision(descriptor, self._miss_reason(counts, descriptor))

    def _miss_reason(self, counts: BatchCounts, chosen: BatchExecutionDescriptor) -> str:
        if chosen.cg_mode is CUDAGraphMode.FULL or self.mode is CUDAGraphMode.NONE:
            return ""
        full = [d for d in self.descriptors if d.cg_mode is CUDAGraphMode.FULL]
        if not self.mode.has_full_cudagraphs():
            return "mode captures no FULL graph"
        if counts.has_prefill and self.mode.separate_routine:
            return "batch has a prefill"
        if not full:
            return "no FULL graph was captured"
        is_varlen = any(d.max_query_len is not None for d in full)
        if counts.uniform_token_count is None and self.mode.separate_routine and not is_varlen:
            return "queries are not uniform"
        if counts.num_reqs > max(d.num_reqs or 0 for d in full):
            return "more requests than the largest FULL graph"
        if counts.num_tokens > max(d.num_tokens for d in full):
            return "more tokens than the largest FULL graph"
        return "no FULL graph with this query length"


class FollowingDispatcher(Dispatcher):
    """Runs each step as it is told, where it is, and keeps what it would have chosen.

    For an engine that has to prepare the batches of another one, padded as that one padded them.
    """

    told: BatchExecutionDescriptor | None = None
    own: BatchExecutionDescriptor

    def decide(self, counts: BatchCounts) -> Decision:
        """The descriptor that was told, with the reason for its own choice."""
        chosen = super().decide(replace(counts, num_ubatches=1))
        self.own = chosen.descriptor
        return chosen if self.told is None else Decision(self.told, chosen.miss_reason)


def covers(
    descriptor: BatchExecutionDescriptor,
    num_reqs: int,
    num_tokens: int,
    uniform_token_count: int | None,
    max_query_len: int | None = None,
) -> bool:
    """Whether a captured shape can hold a batch of these rank-local counts."""
    if num_tokens > descriptor.num_tokens:
        return False
    if descriptor.num_reqs is not None and num_reqs > descriptor.num_reqs:
        return False
    if descriptor.max_query_len is not None:
        return max_query_len is not None and max_query_len <= descriptor.max_query_len
    return descriptor.uniform_token_count in (None, uniform_token_count)


def _preference(descriptor: BatchExecutionDescriptor) -> tuple[int, int, int, bool]:
    """Smaller first; among equal ones the graph for one query length before the varlen one."""
    return (
        FULL_RANK[descriptor.cg_mode],
        descriptor.num_tokens,
        descriptor.num_reqs or 0,
        descriptor.max_query_len is not None,
    )
