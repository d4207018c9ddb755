"""C10 on reasons: what a step says of why no FULL graph served it has to be true (SPEC 3).

Owns the reasons that there are, in the words that reports show, and when each of them holds. Knows
no engine: the words are told here once more, and a test holds both to be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from pcpbench.checks.oracle import StepExpectation
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode

PREFILL: Final = "batch has a prefill"
UNEQUAL: Final = "queries are not uniform"
REQUESTS: Final = "more requests than the largest FULL graph"
TOKENS: Final = "more tokens than the largest FULL graph"
QUERY_LENGTH: Final = "no FULL graph with this query length"

ALWAYS_JUDGED: Final = frozenset({PREFILL, REQUESTS, TOKENS})
"""Those that are judged of a target that hands dispatch other counts, and words some its own way:
which queries it takes for equal hangs on those counts."""


def true_reasons(
    candidates: Iterable[BatchExecutionDescriptor], expected: StepExpectation, num_reqs: int
) -> Iterator[str]:
    """The reasons that hold for a step, one at least where no FULL graph covers it.

    candidates: those of the arm, FULL ones among them. num_reqs: rows that dispatch goes by. Of
    graphs for 4 decodes of one token, 5 decodes of one are too many requests and too many tokens,
    and 2 of two tokens are of another length.
    """
    full = [d for d in candidates if d.cg_mode is CUDAGraphMode.FULL]
    found = []
    if expected.has_prefill:
        found.append(PREFILL)
    elif expected.uniform_token_count is None and all(d.max_query_len is None for d in full):
        found.append(UNEQUAL)
    if num_reqs > max(d.num_reqs or 0 for d in full):
        found.append(REQUESTS)
    if expected.dispatch_num_tokens > max(d.num_tokens for d in full):
        found.append(TOKENS)
    yield from found or [QUERY_LENGTH]
