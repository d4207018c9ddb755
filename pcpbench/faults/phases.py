"""Faults of phase: prefill or decode by the look of a query (K18)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from pcpbench.engine.input_batch import InputBatch
from pcpbench.engine.request_state import RequestState
from pcpbench.faults.classes import PCP, shipped
from pcpbench.faults.fault import Site
from pcpbench.records import BoolArray

ONE_TOKEN: Final = replace(PCP, scenario="s4-one-token-prompts")


DRAFT_LENGTH: Final = replace(PCP, scenario="s4-draft-length-prompts", spec_tokens=3)


def _rephase(site: Site, phase: Callable[[InputBatch], BoolArray]) -> None:
    def faulty(make: Callable[..., InputBatch], *args: Any) -> InputBatch:
        batch = make(*args)
        is_prefilling = phase(batch)
        if (is_prefilling != batch.is_prefilling_np).any():
            site.hit()
        has_prefill = bool(is_prefilling.any())
        return replace(batch, is_prefilling_np=is_prefilling, has_prefill=has_prefill)

    site.wrap(InputBatch, "from_plan", faulty)


def one_token_is_decode(site: Site) -> None:
    """Whatever has one query token is a decode."""
    _rephase(site, lambda batch: batch.is_prefilling_np & (batch.num_scheduled_tokens > 1))


def last_chunk_is_decode(site: Site) -> None:
    """A query of one token behind computed ones is a decode."""

    def phase(batch: InputBatch) -> BoolArray:
        is_last = (batch.num_scheduled_tokens == 1) & (batch.num_computed_tokens_np > 0)
        still: BoolArray = batch.is_prefilling_np & ~is_last
        return still

    _rephase(site, phase)


def first_decode_is_prefill(site: Site) -> None:
    """The first decode still counts as prefill: computed <= prefill_len."""
    _rephase(site, lambda batch: batch.num_computed_tokens_np <= batch.prefill_len_np)


def first_row_speaks_for_all(site: Site) -> None:
    """A batch has a prefill if its first row prefills."""

    def faulty(make: Callable[..., InputBatch], *args: Any) -> InputBatch:
        batch = make(*args)
        has_prefill = bool(batch.is_prefilling_np[0])
        # Where queries are longer the engine would refuse the batch: no silent fault.
        if has_prefill == batch.has_prefill or batch.num_scheduled_tokens.max() > 1:
            return batch
        site.hit()
        return replace(batch, has_prefill=has_prefill)

    site.wrap(InputBatch, "from_plan", faulty)


def _decode_length(site: Site, least_computed: int) -> None:
    """Whatever has as many query tokens as a decode, behind so many computed ones, is one."""

    def faulty(
        make: Callable[..., InputBatch], scheduled: Any, state: RequestState, *args: Any
    ) -> InputBatch:
        batch = make(scheduled, state, *args)
        looks = batch.num_scheduled_tokens == 1 + state.num_speculative_steps
        looks &= batch.num_computed_tokens_np >= least_computed
        still = batch.is_prefilling_np & ~looks
        if still.sum() < batch.is_prefilling_np.sum():
            site.hit()
        return replace(batch, is_prefilling_np=still, has_prefill=bool(still.any()))

    site.wrap(InputBatch, "from_plan", faulty)


def decode_length_is_decode(site: Site) -> None:
    """A prompt of 1 + k tokens is a decode."""
    _decode_length(site, 0)


def last_chunk_of_decode_length(site: Site) -> None:
    """A chunk of 1 + k tokens behind computed ones is a decode."""
    _decode_length(site, 1)


FAULTS: Final = (
    shipped("K18", "one-token-prompt-as-decode", "A prompt of one token is taken for a decode.",
            one_token_is_decode, "C7", "C10", "C12", setting=ONE_TOKEN),
    shipped("K18", "last-chunk-as-decode", "A last prefill chunk of one token is taken for a "
            "decode.", last_chunk_is_decode, "C7", "C10", "C12", setting=ONE_TOKEN),
    shipped("K18", "first-decode-as-prefill", "A request's first decode is taken for a prefill.",
            first_decode_is_prefill, "C7", "C10", setting=ONE_TOKEN),
    shipped("K18", "first-row-speaks-for-all", "The first row's phase is taken for the whole "
            "batch's.", first_row_speaks_for_all, "C10", setting=ONE_TOKEN),
    shipped("K18", "draft-length-prompt-as-decode", "A prompt of 1 + k tokens is taken for a "
            "decode with k drafts.", decode_length_is_decode, "C7", "C10", setting=DRAFT_LENGTH),
    shipped("K18", "draft-length-chunk-as-decode", "A last prefill chunk of 1 + k tokens is taken "
            "for a decode with k drafts.", last_chunk_of_decode_length, "C7", "C10",
            setting=DRAFT_LENGTH),
)  # fmt: skip
