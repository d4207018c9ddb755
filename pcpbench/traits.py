"""Where a target is known to differ from the contracts, and what reports say of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pcpbench.records import Notice


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Where a target is known to differ from the contracts, and how it is judged instead.

    counts_whole_batch: the request count that it hands to dispatch is the whole batch's; it is held
    to the largest rank's (C10) where a FULL graph depends on it, in decode steps, and only there.
    idle_has_context: whether the FULL graph of an idle step under DCP gets dummy context.
    stale_padding_without_pcp: ids and positions of padding tokens are what earlier steps left,
    in worlds without PCP; they are flagged as padding all the same, and C16 shows whether they are
    read.
    short_prefill_is_decode_without_pcp: a prefill of one token behind a context is dispatched like
    a decode in worlds without PCP; C10 takes exactly the choice that follows as well as its own.
    given_back_in_tables_under_dcp: under DCP columns of a table that lie wholly before a sliding
    window keep the ids that the request had there; C5 takes them for the null block.
    notices, notices_without_pcp, notices_with_dcp, notices_with_dcp_and_window: all of that in
    words, for reports of every run and of runs that it matters to.
    """

    counts_whole_batch: bool = False
    idle_has_context: bool = True
    stale_padding_without_pcp: bool = False
    short_prefill_is_decode_without_pcp: bool = False
    given_back_in_tables_under_dcp: bool = False
    notices: tuple[Notice, ...] = ()
    notices_without_pcp: tuple[Notice, ...] = ()
    notices_with_dcp: tuple[Notice, ...] = ()
    notices_with_dcp_and_window: tuple[Notice, ...] = ()

    def notices_for(
        self, pcp_size: int, dcp_size: int, has_window: bool = False
    ) -> tuple[Notice, ...]:
        """What a report of such a world says of them. has_window: of the model."""
        return (
            *self.notices,
            *(self.notices_without_pcp if pcp_size == 1 else ()),
            *(self.notices_with_dcp if dcp_size > 1 else ()),
            *(self.notices_with_dcp_and_window if dcp_size > 1 and has_window else ()),
        )


NO_TRAITS: Final = Traits()
"""A target that is held to every contract as it stands."""
