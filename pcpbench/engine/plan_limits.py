"""The limits of a plan: a scenario's own, what the command line says instead, and what fits both.

Owns the refusals that name a flag. Knows no request and no step.
"""

from __future__ import annotations

import msgspec

from pcpbench.errors import UsageError
from pcpbench.scenarios.fields import field_problem
from pcpbench.scenarios.limits import limits_problem
from pcpbench.scenarios.schema import Limits


def resolve_limits(limits: Limits, overrides: dict[str, int | None], query_len: int) -> Limits:
    """The limits of a plan whose decodes have query_len tokens; raises UsageError for bad ones."""
    given = {name: value for name, value in overrides.items() if value is not None}
    for name, value in given.items():
        reason = field_problem(Limits, name, value)
        if reason is not None:
            raise UsageError(f"{flag(name)} {reason}.")
    num_seqs = given.get("max_num_seqs", limits.max_num_seqs if query_len > 1 else 0)
    budget = max(limits.max_num_batched_tokens, num_seqs * query_len)
    given.setdefault("max_num_batched_tokens", budget)
    resolved = msgspec.structs.replace(limits, **given)
    if query_len > 1 and resolved.max_num_batched_tokens < resolved.max_num_seqs * query_len:
        raise UsageError(
            f"--max-num-batched-tokens is {resolved.max_num_batched_tokens}: "
            f"{resolved.max_num_seqs} decodes of {query_len} tokens need "
            f"{resolved.max_num_seqs * query_len}."
        )
    problem = limits_problem(resolved)
    if problem is not None:
        raise UsageError(f"{flag(problem.field)} {problem.reason}.")
    return resolved


def flag(field_name: str) -> str:
    """The option that sets a limit."""
    return "--" + field_name.replace("_", "-")
