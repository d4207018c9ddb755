"""Global batches as vLLM's model runner prepares them, for the cases of `check partition`.

Owns the stand-in for a runner that `GPUModelRunner.prepare_inputs` and `gather_batch_req_state` are
called on, and the results of its kernels row by row. A kernel's program works on one row of the
batch and reads nothing of the others: batches that are not run whole are put together from rows
that were run many at a time, each distinct row once.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcpbench.errors import CannotMeasure
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.partition_cases import (
    MAX_MODEL_LEN,
    MAX_NUM_TOKENS,
    MAX_QUERY_LEN,
    NUM_SLOTS,
    VOCAB_SIZE,
    CaseRequest,
    token_at,
)
from pcpbench.targets.vllm.api import VllmApi
from pcpbench.targets.vllm.names import WORKER
from pcpbench.targets.vllm.settings import Settings

MAX_DRAFTS = 15
ROWS = 256
"""Rows that one call of the kernels takes when rows are put together."""


class Row(NamedTuple):
    """What the kernels made of one request: input_ids [q], positions [q], its length."""

    input_ids: Tensor
    positions: Tensor
    seq_len: int


class RunnerInputs:
    """vLLM's own preparation of a step's global batch, on a stand-in for its model runner.

    num_whole: batches prepared whole. num_rows: distinct rows prepared for the others.
    Raises CannotMeasure where the installed runner lacks a method.
    """

    def __init__(self, api: VllmApi, device: torch.device) -> None:
        self.api, self.device = api, device
        self.num_whole = self.num_rows = 0
        module = importlib.import_module(f"{WORKER}.model_runner")
        self._runner: Any = getattr(module, "GPUModelRunner", None)
        self._state: Any = getattr(module, "BatchReqState", None)
        for name in ("prepare_inputs", "gather_batch_req_state"):
            if self._state is None or not hasattr(self._runner, name):
                raise CannotMeasure(
                    f"vllm {api.version} has no {WORKER}.model_runner.GPUModelRunner.{name}: this "
                    "version of pcpbench knows 0.33's."
                )
        self._self = self._stand_in(NUM_SLOTS, MAX_NUM_TOKENS)
        self._many = self._stand_in(ROWS, ROWS * MAX_QUERY_LEN)
        self._rows: dict[CaseRequest, Row] = {}
        tokens = MAX_NUM_TOKENS
        self._input_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)

    def _stand_in(self, max_num_reqs: int, max_num_tokens: int) -> Any:
        """What prepare_inputs reads of a runner."""
        state = self.api.request_state(
            max_num_reqs=max_num_reqs,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=max_num_tokens,
            num_speculative_steps=MAX_DRAFTS,
            vocab_size=VOCAB_SIZE,
            device=self.device,
        )
        for slot in range(max_num_reqs):
            state.req_id_to_index[f"row{slot}"] = slot
        return Settings(
            "GPUModelRunner",
            self.api.version,
            input_buffers=self.api.InputBuffers(max_num_reqs, max_num_tokens, self.device),
            req_states=state,
            device=self.device,
            max_num_reqs=max_num_reqs,
            decode_query_len=1,
            use_pp=False,
            model_state=Settings(
                "model_state", self.api.version, num_new_sampled_tokens_per_step=1
            ),
            model_config=Settings("model_config", self.api.version, rswa_window=None),
            adaptive_verification=None,
            fast_prefill=None,
            pcp_manager=None,
        )

    def uniform_token_count(
        self, requests: Sequence[CaseRequest], has_pcp: bool
    ) -> tuple[int | None, bool]:
        """Tokens of each request of a uniform decode batch, and whether any prefills, by vLLM."""
        places = [(request.slot, request) for request in requests]
        self._set_host(self._self, places)
        self._self.pcp_manager = object() if has_pcp else None
        output = self._output(places)
        state, uniform = self._runner.gather_batch_req_state(self._self, output, False)
        self._self.pcp_manager = None
        return uniform, bool(state.has_prefill)

    def whole(
        self, requests: Sequence[CaseRequest], descriptor: BatchExecutionDescriptor | None
    ) -> Any:
        """vLLM's InputBatch, every kernel run on this batch.

        descriptor: what a runner without PCP pads it to; None leaves it as it is.
        """
        self.num_whole += 1
        places = [(request.slot, request) for request in requests]
        return self._prepare(self._self, places, descriptor)

    def composed(self, requests: Sequence[CaseRequest]) -> Any:
        """The same batch, unpadded, from rows that the kernels worked on before."""
        rows = self.rows(requests)
        lengths = np.array([r.num_scheduled_tokens for r in requests], dtype=np.int32)
        starts = np.zeros(len(requests) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        count = int(starts[-1])
        torch.cat([row.input_ids for row in rows], out=self._input_ids[:count])
        torch.cat([row.positions for row in rows], out=self._positions[:count])
        return self._batch(requests, lengths, starts, [row.seq_len for row in rows])

    def rows(self, requests: Sequence[CaseRequest]) -> list[Row]:
        """What the kernels make of each request; new ones are run together."""
        missing = [r for r in dict.fromkeys(requests) if r not in self._rows]
        empty = [r for r in missing if not r.num_scheduled_tokens]
        for request in empty:  # no token, so no kernel has anything to write
            none = torch.zeros(0, dtype=torch.int64, device=self.device)
            self._rows[request] = Row(none.int(), none, request.num_computed_tokens)
        missing = [r for r in missing if r.num_scheduled_tokens]
        for first in range(0, len(missing), ROWS):
            self._run_rows(missing[first : first + ROWS])
        return [self._rows[request] for request in requests]

    def _run_rows(self, requests: list[CaseRequest]) -> None:
        self.num_rows += len(requests)
        batch = self._prepare(self._many, list(enumerate(requests)), None)
        place = 0
        for at, request in enumerate(requests):
            end = place + request.num_scheduled_tokens
            self._rows[request] = Row(
                batch.input_ids[place:end].clone(),
                batch.positions[place:end].clone(),
                int(batch.seq_lens[at]),
            )
            place = end

    def _prepare(
        self,
        runner: Any,
        places: list[tuple[int, CaseRequest]],
        descriptor: BatchExecutionDescriptor | None,
    ) -> Any:
        """GPUModelRunner.prepare_inputs on a batch of (request slot, request)."""
        self._set_host(runner, places)
        self._set_device(runner, places)
        total = sum(request.num_scheduled_tokens for _, request in places)
        shape = descriptor or BatchExecutionDescriptor(CUDAGraphMode.NONE, total, None)
        batch_state = self._state(
            **{name: value for name, value in self._facts(places).items()
               if name in self._state._fields}
        )  # fmt: skip
        return self._runner.prepare_inputs(
            runner, self._output(places), batch_state, self.api.descriptor(shape), 0
        )

    def _facts(self, places: list[tuple[int, CaseRequest]]) -> dict[str, Any]:
        """BatchReqState of a batch in this order; the runner would sort it first."""
        requests = [request for _, request in places]
        drafts = np.array([num_drafts(request) for request in requests], dtype=np.int32)
        prefilling = np.array([request.is_prefilling for request in requests])
        computed = np.array([r.num_computed_tokens for r in requests], dtype=np.int32)
        prefill_len = np.array([r.prefill_len for r in requests], dtype=np.int32)
        return {
            "req_ids": [f"row{slot}" for slot, _ in places],
            "num_scheduled_tokens": np.array(
                [r.num_scheduled_tokens for r in requests], dtype=np.int32
            ),
            "num_tokens": sum(r.num_scheduled_tokens for r in requests),
            "num_draft_tokens_np": drafts if drafts.any() else None,
            "idx_mapping_np": np.array([slot for slot, _ in places], dtype=np.intp),
            "prefill_len_np": prefill_len,
            "num_computed_prefill_tokens_np": np.minimum(computed, prefill_len),
            "is_prefilling_np": prefilling,
            "max_seq_len_np": None,
            "has_prefill": bool(prefilling.any()),
            "prefill_runs_as_decode_np": None,
            "decode_graph_eligible": not prefilling.any(),
        }

    def _output(self, places: list[tuple[int, CaseRequest]]) -> Any:
        """What is read of a SchedulerOutput."""
        lengths = {f"row{slot}": request.num_scheduled_tokens for slot, request in places}
        drafts = {
            f"row{slot}": [0] * num_drafts(request)
            for slot, request in places
            if num_drafts(request)
        }
        return SimpleNamespace(
            num_scheduled_tokens=lengths,
            total_num_scheduled_tokens=sum(lengths.values()),
            scheduled_spec_decode_tokens=drafts,
            has_structured_output_requests=False,
        )

    def _set_host(self, runner: Any, places: list[tuple[int, CaseRequest]]) -> None:
        state = runner.req_states
        for slot, request in places:
            state.prefill_len.np[slot] = request.prefill_len
            state.num_computed_tokens_np[slot] = request.num_computed_tokens
            state.num_computed_prefill_tokens[slot] = min(
                request.num_computed_tokens, request.prefill_len
            )

    def _set_device(self, runner: Any, places: list[tuple[int, CaseRequest]]) -> None:
        """The device's state, as if each request had come as far as its case says."""
        state = runner.req_states
        state.prefill_len.copy_to_uva()
        for slot, request in places:
            first, end = request.num_computed_tokens, request.prefill_len
            state.num_computed_tokens.gpu[slot] = first
            known = [token_at(request.slot, at) for at in range(end)]
            known += [0] * (MAX_MODEL_LEN - end)
            state.all_token_ids.gpu[slot] = torch.tensor(known, dtype=torch.int32)
            if request.is_prefilling:
                continue
            state.last_sampled_tokens[slot, 0] = token_at(request.slot, first)
            drafts = [token_at(request.slot, first + 1 + at) for at in range(MAX_DRAFTS)]
            state.draft_tokens[slot] = torch.tensor(drafts)

    def _batch(
        self,
        requests: Sequence[CaseRequest],
        lengths: Any,
        starts: Any,
        seq_lens: list[int],
    ) -> Any:
        """vLLM's InputBatch of rows that were prepared before."""
        count, num_reqs = int(starts[-1]), len(requests)
        facts = self._facts([(request.slot, request) for request in requests])
        slots = facts["idx_mapping_np"]
        device = self.device
        idx_mapping = torch.from_numpy(slots.astype(np.int64)).to(device)
        computed = np.array([r.num_computed_tokens for r in requests], dtype=np.int32)
        cu_num_logits = np.arange(num_reqs + 1, dtype=np.int32)
        return self.api.batch(
            req_ids=facts["req_ids"],
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs,
            idx_mapping=idx_mapping,
            idx_mapping_np=slots,
            expanded_idx_mapping=idx_mapping,
            expanded_local_pos=torch.zeros(num_reqs, dtype=torch.int32, device=device),
            num_scheduled_tokens=lengths,
            num_tokens=count,
            num_tokens_after_padding=count,
            num_draft_tokens=0,
            num_draft_tokens_per_req=facts["num_draft_tokens_np"],
            query_start_loc=torch.from_numpy(starts.copy()).to(device),
            query_start_loc_np=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            seq_lens_cpu_upper_bound=torch.from_numpy(computed + lengths),
            dcp_local_seq_lens=None,
            num_computed_tokens_np=computed,
            prefill_len_np=facts["prefill_len_np"],
            num_computed_prefill_tokens_np=facts["num_computed_prefill_tokens_np"],
            is_prefilling_np=facts["is_prefilling_np"],
            has_prefill=facts["has_prefill"],
            decode_graph_eligible=facts["decode_graph_eligible"],
            input_ids=self._input_ids[:count],
            positions=self._positions[:count],
            is_padding=torch.zeros(count, dtype=torch.bool, device=device),
            logits_indices=torch.from_numpy(starts[1:].astype(np.int64) - 1).to(device),
            cu_num_logits=torch.from_numpy(cu_num_logits.copy()).to(device),
            cu_num_logits_np=cu_num_logits,
            has_structured_output_reqs=False,
            prompt_lens=None,
        )


def num_drafts(request: CaseRequest) -> int:
    """Draft tokens among a request's: a decode of 3 tokens has 2."""
    return 0 if request.is_prefilling else max(0, request.num_scheduled_tokens - 1)
