"""Phase by shape (K18) and the choice of a graph (K20, K21, K37) in vLLM's runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pcpbench.faults.fault import Site
from pcpbench.faults.vllm.worlds import DCP, DRAFTS, SHARDED, entry


def one_token_is_decode(site: Site) -> None:
    """Whatever has one query token is no prefill."""

    def faulty(gather: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        state, uniform = gather(self, *args, **named)
        if state is None:
            return state, uniform
        still = state.is_prefilling_np & (state.num_scheduled_tokens > 1)
        if still.sum() < state.is_prefilling_np.sum():
            site.hit()
        has_prefill = bool(still.any())
        changed = {"is_prefilling_np": still, "has_prefill": has_prefill}
        if "decode_graph_eligible" in state._fields:
            changed["decode_graph_eligible"] = not has_prefill
        lengths = state.num_scheduled_tokens
        uniform = runner.get_uniform_decode_token_count(
            len(lengths), int(lengths.sum()), int(lengths.max()), not has_prefill
        )
        return state._replace(**changed), uniform

    runner = site.api.modules["model_runner"]
    site.wrap(runner.GPUModelRunner, "gather_batch_req_state", faulty)


def uniform_by_shape(site: Site) -> None:
    """A batch whose queries are all as long as a decode's is a uniform decode, prefill or not."""

    def faulty(
        count: Callable[..., int | None], num_reqs: int, num_tokens: int, longest: int, *rest: bool
    ) -> int | None:
        found = count(num_reqs, num_tokens, longest, *rest)
        if num_tokens != longest * num_reqs:
            return found
        if found is None:
            site.hit()
        return longest

    site.wrap(site.api.modules["model_runner"], "get_uniform_decode_token_count", faulty)


def own_counts(site: Site) -> None:
    """Each rank dispatches on its own tokens, not on the largest rank's."""

    def faulty(most: Callable[..., int], self: Any, lengths: Any, is_prefilling: Any) -> int:
        chunks = self._iter_rank_chunks(self.pcp_rank, lengths, is_prefilling)
        own: int = max(1, sum(count for _, _, count in chunks))
        if own != most(self, lengths, is_prefilling):
            site.hit()
        return own

    site.wrap(site.api.PCPManager, "get_num_tokens_for_dispatch", faulty)


def exact_fit_refused(site: Site) -> None:
    """A graph of exactly the batch's size is passed over for the next larger one."""

    def faulty(
        dispatch: Callable[..., Any], self: Any, num_reqs: int, num_tokens: int, *a: Any, **kw: Any
    ) -> Any:
        sound = dispatch(self, num_reqs, num_tokens, *a, **kw)
        larger = dispatch(self, num_reqs, num_tokens + 1, *a, **kw)
        none = site.api.CUDAGraphMode.NONE
        if sound.num_tokens != num_tokens or none in (sound.cg_mode, larger.cg_mode):
            return sound
        site.hit()
        return larger

    site.wrap(site.api.CudaGraphManager, "dispatch", faulty)


def uniform_count_lost(site: Site) -> None:
    """The candidates are never told that a batch is a uniform decode."""

    def faulty(
        dispatch: Callable[..., Any], self: Any, reqs: int, tokens: int, uniform: Any, **kw: Any
    ) -> Any:
        found = dispatch(self, reqs, tokens, None, **kw)
        if found != dispatch(self, reqs, tokens, uniform, **kw):
            site.hit()
        return found

    site.wrap(site.api.CudaGraphManager, "dispatch", faulty)


def sizes_of_one_token(site: Site) -> None:
    """Decode graphs are laid out for queries of one token, though decodes have drafts."""

    def faulty(make: Callable[..., None], self: Any) -> None:
        length = self.decode_query_len
        self.decode_query_len = 1
        try:
            make(self)
        finally:
            self.decode_query_len = length
        if length > 1:
            site.hit()

    site.wrap(site.api.CudaGraphManager, "_init_candidates", faulty)


def largest_missing(site: Site) -> None:
    """The graph of the largest decode batch is not among the candidates."""

    def faulty(make: Callable[..., None], self: Any) -> None:
        make(self)
        full = site.api.CUDAGraphMode.FULL
        captured = self._capture_descs.get(full, [])
        if not captured:
            return
        largest = max(captured, key=lambda descriptor: descriptor.num_tokens)
        captured.remove(largest)
        for candidates in self._candidates.values():
            candidates[:] = [found for found in candidates if found != largest]
        site.hit()

    site.wrap(site.api.CudaGraphManager, "_init_candidates", faulty)


FAULTS: Final = (
    entry("K18", "one-token-prompt-as-decode", "gather_batch_req_state takes a query of one token "
          "for a decode.", one_token_is_decode, "C3", "C10", setting=DCP),
    entry("K18", "uniform-by-shape-alone", "get_uniform_decode_token_count looks at lengths only: "
          "one-token prompts replay a decode graph.", uniform_by_shape, "C10", setting=DCP),
    entry("K20", "sizes-for-one-token", "The candidates of CudaGraphManager are laid out for "
          "decodes of one token, though these have drafts.", sizes_of_one_token, "C10",
          setting=DRAFTS, at_capture=True),
    entry("K21", "dispatch-on-own-counts", "PCPManager.get_num_tokens_for_dispatch gives a rank's "
          "own tokens.", own_counts, "C10", setting=SHARDED),
    entry("K21", "exact-fit-refused", "CudaGraphManager.dispatch passes over the graph that fits "
          "exactly.", exact_fit_refused, "C10"),
    entry("K21", "uniform-count-lost", "CudaGraphManager.dispatch is not told that a decode is "
          "uniform.", uniform_count_lost, "C10"),
    entry("K37", "largest-batch-not-captured", "The candidates of CudaGraphManager lack the "
          "largest decode batch.", largest_missing, "C10", at_capture=True),
)  # fmt: skip
