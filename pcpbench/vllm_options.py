"""Which options `--target vllm` does not take. Imports neither torch nor vLLM: told at once."""

from __future__ import annotations

from pcpbench.errors import UsageError


def check_vllm_options(*, microbatch: bool, draft_model: bool, dynamic_spec: bool) -> None:
    """Raise UsageError for the first option given that vLLM's runner is not driven with."""
    for is_given, flag, why in (
        (
            microbatch,
            "--microbatch",
            "vLLM's runner cuts steps only where several data-parallel ranks agree on it, and "
            "there is one",
        ),
        (
            draft_model,
            "--draft-model",
            "vLLM's speculators are not on the stand, and the drafts are planned",
        ),
        (dynamic_spec, "--dynamic-spec", "its runner is driven with one number of drafts"),
    ):
        if is_given:
            raise UsageError(
                f"{flag} with --target vllm: {why}: leave {flag} out, or use --target builtin."
            )
