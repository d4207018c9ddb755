"""What the device knows of each request: its tokens and how far it has come.

Owns one slot a request and the tensors indexed by slot. Knows no block and no batch. The host's
cursors are copies of belief; under speculative decoding the device's are the truth (SPEC 10): the
host takes all drafts of the last step for accepted, until the next step tells it better.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pcpbench.device.staging import to_device
from pcpbench.engine.verification import count_accepted
from pcpbench.records import BoolArray, IntArray


class RequestState:
    """State of up to max_num_reqs requests, N slots.

    all_token_ids: int32 [N, max_model_len + num_speculative_steps], prompt and generated tokens;
    what lies past total_len may be a rejected draft's target.
    num_computed_tokens, prompt_len, prefill_len, total_len: int32 [N]; prefill_len counts tokens
    known at admission, total_len those known by now.
    last_sampled_tokens: int32 [N, 1]. draft_tokens: int32 [N, num_speculative_steps].
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        num_speculative_steps: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.max_num_reqs, self.max_model_len = max_num_reqs, max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_speculative_steps, self.vocab_size = num_speculative_steps, vocab_size
        self.device = device
        self.req_id_to_index: dict[str, int] = {}
        self.index_to_req_id: dict[int, str] = {}
        # The slot freed last is taken first, so that what a tenant left behind is met again soon.
        self.free_indices = list(range(max_num_reqs - 1, -1, -1))
        self.all_token_ids = self._zeros(max_num_reqs, max_model_len + num_speculative_steps)
        self.prompt_len = self._zeros(max_num_reqs)
        self.prefill_len = self._zeros(max_num_reqs)
        self.total_len = self._zeros(max_num_reqs)
        self.num_computed_tokens = self._zeros(max_num_reqs)
        self.num_computed_tokens_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.total_len_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.last_sampled_tokens = self._zeros(max_num_reqs, 1)
        self.draft_tokens = self._zeros(max_num_reqs, num_speculative_steps)
        self._staged: dict[int, tuple[int, int, list[int]]] = {}

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    @property
    def num_reqs(self) -> int:
        """Requests that have a slot."""
        return len(self.req_id_to_index)

    def add_request(
        self,
        req_id: str,
        prompt_len: int,
        all_token_ids: Sequence[int],
        num_computed_tokens: int,
        max_tokens: int,
    ) -> None:
        """Give a request a slot; `apply_staged_writes` sends its state to the device.

        all_token_ids: the prompt and whatever was generated before a preemption; their number is
        the request's prefill_len. max_tokens: tokens it may generate. Raises ValueError for a known
        id, for a prompt longer than the tokens, for one longer than max_model_len, and when no slot
        is free.
        """
        num_tokens = len(all_token_ids)
        if req_id in self.req_id_to_index:
            raise ValueError(f"request {req_id!r} has a slot already")
        if not self.free_indices:
            raise ValueError(f"request {req_id!r}: all {self.max_num_reqs} slots are taken")
        if not prompt_len <= num_tokens <= self.max_model_len:
            raise ValueError(
                f"request {req_id!r} has a prompt of {prompt_len} among {num_tokens} tokens; at "
                f"most {self.max_model_len} fit"
            )
        index = self.free_indices.pop()
        self.req_id_to_index[req_id] = index
        self.index_to_req_id[index] = req_id
        self.num_computed_tokens_np[index] = num_computed_tokens
        self.total_len_np[index] = num_tokens
        self._staged[index] = (prompt_len, num_computed_tokens, list(all_token_ids))

    def apply_staged_writes(self) -> None:
        """Write the state of requests that were added since the last call."""
        if not self._staged:
            return
        lengths = [len(tokens) for _, _, tokens in self._staged.values()]
        numbers = np.array(
            [
                [index, prompt_len, length, computed]
                for (index, (prompt_len, computed, _)), length in zip(
                    self._staged.items(), lengths, strict=True
                )
            ],
            dtype=np.int64,
        )
        index, prompt_len, total_len, computed = to_device(numbers.T.copy(), self.device)
        for target, values in (
            (self.prompt_len, prompt_len),
            (self.prefill_len, total_len),
            (self.total_len, total_len),
            (self.num_computed_tokens, computed),
        ):
            target.index_copy_(0, index, values.to(torch.int32))
        for slot, (_, _, tokens) in self._staged.items():
            row = to_device(np.array(tokens, dtype=np.int32), self.device)
            self.all_token_ids[slot, : len(tokens)].copy_(row)
        self.last_sampled_tokens.index_fill_(0, index, 0)
        self._staged.clear()

    def remove_request(self, req_id: str) -> int | None:
        """Free a request's slot; returns it, or None for an id that has none."""
        index = self.req_id_to_index.pop(req_id, None)
        if index is None:
            return None
        del self.index_to_req_id[index]
        self._staged.pop(index, None)
        self.free_indices.append(index)
        return index

    def known_tokens(self, req_id: str) -> list[int]:
        """All tokens of a request so far, prompt first (waits for the device)."""
        index = self.req_id_to_index[req_id]
        tokens: list[int] = self.all_token_ids[index, : int(self.total_len[index])].tolist()
        return tokens

    def post_update(
        self,
        idx_mapping_np: IntArray,
        num_scheduled_tokens: IntArray,
        samples: BoolArray,
        sampled_tokens: Tensor,
    ) -> None:
        """Advance cursors by a step's tokens and append what was sampled.

        idx_mapping_np, num_scheduled_tokens, samples: [num_reqs]; `samples` marks the rows that
        sampled. sampled_tokens: int [number of marks], in row order, on the device. Raises
        ValueError when a request would grow past max_model_len.
        """
        packed = to_device(np.stack((idx_mapping_np, num_scheduled_tokens)), self.device)
        self.num_computed_tokens.index_add_(0, packed[0], packed[1].to(torch.int32))
        self.num_computed_tokens_np[idx_mapping_np] += num_scheduled_tokens
        sampling = idx_mapping_np[samples].astype(np.int64)
        if not len(sampling):
            return
        if self.total_len_np[sampling].max() >= self.max_model_len:
            raise ValueError(f"a request has {self.max_model_len} tokens: no more fit")
        self.total_len_np[sampling] += 1
        slots = to_device(sampling, self.device)
        tokens = sampled_tokens.to(torch.int32)
        lengths = self.total_len.index_select(0, slots)
        self.last_sampled_tokens[:, 0].index_copy_(0, slots, tokens)
        self.all_token_ids[slots, lengths] = tokens
        self.total_len.index_copy_(0, slots, lengths.add_(1))

    def set_drafts(self, idx_mapping_np: IntArray, drafts: IntArray) -> None:
        """Give requests the drafts of their next step.

        idx_mapping_np: [R]. drafts: int [R, num_speculative_steps].
        """
        slots = to_device(idx_mapping_np.astype(np.int64), self.device)
        self.draft_tokens.index_copy_(0, slots, to_device(drafts.astype(np.int32), self.device))

    def post_verify(
        self,
        idx_mapping_np: IntArray,
        num_scheduled_tokens: IntArray,
        num_computed_tokens: IntArray,
        num_logits: IntArray,
        targets: Tensor,
    ) -> Tensor:
        """`post_update` of a step that verifies drafts; accepted ones, int64 [rows that sample].

        num_computed_tokens: [num_reqs], where the step began, as the host knows by now.
        num_logits: [num_reqs], 0 for a row that does not sample, else 1 plus its drafts. targets:
        int [sum of num_logits], the best token behind each of these query tokens. Cursors advance
        by the accepted tokens only, without the host being asked; a rejected token's KV stays until
        the next step overwrites it.
        """
        (rows,) = num_logits.nonzero()
        ends = num_logits[rows].cumsum()
        packed = np.stack((idx_mapping_np[rows], num_logits[rows] - 1, ends - num_logits[rows]))
        slots, num_drafts, first = to_device(packed.astype(np.int64), self.device)
        offsets = torch.arange(1 + self.num_speculative_steps, device=self.device)
        places = (first.unsqueeze(1) + offsets).clamp_(max=targets.shape[0] - 1)
        tokens = targets.to(torch.int32)[places]
        accepted = count_accepted(self.draft_tokens.index_select(0, slots), tokens, num_drafts)
        scheduled = to_device(np.stack((idx_mapping_np, num_scheduled_tokens)), self.device)
        self.num_computed_tokens.index_add_(0, scheduled[0], scheduled[1].to(torch.int32))
        rejected = (num_drafts - accepted).to(torch.int32)
        self.num_computed_tokens.index_add_(0, slots, rejected, alpha=-1)
        self.num_computed_tokens_np[idx_mapping_np] = num_computed_tokens + num_scheduled_tokens
        lengths = self.total_len.index_select(0, slots)
        columns = lengths.unsqueeze(1) + offsets
        columns.clamp_(max=self.all_token_ids.shape[1] - 1)
        self.all_token_ids[slots.unsqueeze(1), columns] = tokens
        last = tokens.gather(1, accepted.unsqueeze(1))
        self.last_sampled_tokens.index_copy_(0, slots, last)
        self.total_len.index_copy_(0, slots, lengths.add_(accepted.to(torch.int32)).add_(1))
        return accepted
