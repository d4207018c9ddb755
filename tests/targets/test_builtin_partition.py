"""What the engine makes of small batches is the oracle's; what is broken in it is seen."""

from dataclasses import replace

import numpy as np
import pytest

from pcpbench import pcp_manager, pcp_partition
from pcpbench.checks.partition_compare import Tally
from pcpbench.checks.partition_known import explain, may_lack
from pcpbench.checks.partition_oracle import expected_outputs
from pcpbench.engine import block_table, worker
from pcpbench.engine.input_batch import InputBuffers
from pcpbench.partition_enumeration import Choice, sample
from pcpbench.targets.builtin_partition import BuiltinPartitions

CHOICES = [
    Choice(pcp=(1,), dcp=(2,), interleave=(2,)),
    Choice(pcp=(2,), dcp=(1,)),
    Choice(pcp=(2,), dcp=(2,), interleave=(4,)),
    Choice(pcp=(2,), dcp=(4,), interleave=(1,)),
    Choice(pcp=(4,), dcp=(1,)),
]


def tally_of(cases):
    tally = Tally("test", explain, may_lack)
    made = BuiltinPartitions().of(cases[0]).outputs(cases)
    for case, outputs in zip(cases, made, strict=True):
        both = {"oracle": expected_outputs(case), "builtin": outputs}
        tally.compare(str(case), case.group, both, case)
    return tally.result({}, 0.0)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_sample_of_every_world_differs_in_nothing(choice):
    found = tally_of(sample(60, 3, choice))
    assert not found.differences
    assert sum(group.num_compared for group in found.groups) > 1000
    missing = {field.field for field in found.fields if field.num_missing}
    assert all(name.startswith("pcp.") for name in missing)  # whole requests: vLLM's alone


def skip_tokens(original):
    """Chunks of prefills one token short of where they should begin."""

    def cut(grid, column, prefills, counts, short):
        original(grid, column, prefills, counts, short)
        grid.start[1:, column:-1] = np.maximum(grid.start[1:, column:-1] - 1, 0)

    return cut


def keep_stale_rows(original):
    def pad(self, num_reqs, num_rows, num_tokens, num_padded):
        kept = self.seq_lens.clone()
        original(self, num_reqs, num_rows, num_tokens, num_padded)
        self.seq_lens[num_reqs:num_rows] = kept[num_reqs:num_rows]

    return pad


def one_more(original):
    def lengths(out, *rest, **named):
        found = original(out, *rest, **named)
        return None if found is None else found.add_(1)

    return lengths


def other_owner(original):
    def write(table, idx_mapping, starts, positions, size, cp_size, rank, interleave, out):
        original(table, idx_mapping, starts, positions, size, cp_size, 0, interleave, out)

    return write


def no_writer_check(original):
    def layout(*args):
        found = original(*args)
        mask = found.gathered_kv_write_mask.copy()
        mask[:] = True
        return found._replace(gathered_kv_write_mask=mask)

    return layout


@pytest.mark.parametrize(
    ("module", "name", "break_it", "choice", "fields"),
    [
        (pcp_partition, "_cut_prefills", skip_tokens, CHOICES[1], {"positions", "row_start"}),
        (InputBuffers, "pad", keep_stale_rows, CHOICES[1], {"seq_lens"}),
        (worker, "maybe_prepare_dcp_local_seq_lens", one_more, CHOICES[2], {"dcp_local_seq_lens"}),
        (block_table, "write_slots", other_owner, CHOICES[2], {"slot_mappings"}),
        (pcp_manager, "build_layout", no_writer_check, CHOICES[2], {"gathered_kv_write_mask"}),
    ],
    ids=["chunks", "stale rows", "DCP lengths", "slots", "write mask"],
)
def test_what_is_broken_in_the_engine_is_reported(
    monkeypatch, module, name, break_it, choice, fields
):
    monkeypatch.setattr(module, name, break_it(getattr(module, name)))
    found = tally_of(sample(60, 3, choice))
    assert fields <= {difference.field for difference in found.differences}


@pytest.mark.parametrize("name", ["prepare_inputs", "prepare_attention"])
def test_an_engine_that_breaks_is_a_difference_of_every_batch(monkeypatch, name):
    def fail(*args):
        raise IndexError("no such row")

    monkeypatch.setattr(worker.Worker, name, fail)
    cases = sample(2, 3, CHOICES[1])
    found = tally_of(cases)
    broken = [d for d in found.differences if d.right_value == "IndexError: no such row"]
    assert {difference.case for difference in broken} == set(map(str, cases))


def test_a_batch_that_is_no_longer_refused_is_reported(monkeypatch):
    manager = pcp_manager.PCPManager

    def take_all(self, batch, descriptor):
        if descriptor.cg_mode.name == "FULL" and batch.has_prefill:
            batch = replace(batch, has_prefill=False)
        return original(self, batch, descriptor)

    original = manager.partition_batch
    monkeypatch.setattr(manager, "partition_batch", take_all)
    found = tally_of(sample(60, 3, CHOICES[1]))
    assert {"refusal"} == {difference.field for difference in found.differences}
