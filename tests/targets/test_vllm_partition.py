"""The installed vLLM's partition of small batches is the oracle's, but for what is known."""

from __future__ import annotations

import numpy as np
import pytest

from pcpbench.checks.partition_compare import Tally
from pcpbench.checks.partition_known import explain, may_lack
from pcpbench.checks.partition_oracle import expected_outputs
from pcpbench.errors import UsageError
from pcpbench.partition_cases import parse_case
from pcpbench.partition_enumeration import Choice, sample


@pytest.fixture(scope="module")
def makers(api):
    from pcpbench.targets.vllm.partition import VllmPartitions

    return VllmPartitions()


def tally_of(makers, cases):
    tally = Tally("test", explain, may_lack)
    maker = makers.of(cases[0])
    for case, outputs in zip(cases, maker.outputs(cases), strict=True):
        both = {"oracle": expected_outputs(case), "vllm": outputs}
        tally.compare(str(case), case.group, both, case)
    return tally.result(maker.kernels, 0.0)


CASES = [
    "pcp=2 dcp=1 tp=1 interleave=1 FULL reqs=4 tokens=4 ubatches=2: d1@5#0 d1@2#1 d1@3#2 d1@9#5",
    "pcp=2 dcp=1 tp=1 interleave=1 NONE: p5@3+2#2 d1@5#0 p0@4+1#3 d3@2#1",
    "pcp=2 dcp=1 tp=1 interleave=1 PIECEWISE tokens=6: p5@3+2#2 d1@5#0 d1@2#1",
    "pcp=2 dcp=1 tp=1 interleave=1 FULL reqs=1 tokens=4: d1@5#0 d1@2#1 d1@3#2",
    "pcp=2 dcp=1 tp=1 interleave=1 FULL reqs=2 tokens=4: d1@5#0 p1@2#1",
    "pcp=2 dcp=1 tp=1 interleave=1 PIECEWISE tokens=1: d1@5#0 d1@2#1 d1@3#2",
]


def test_a_few_batches_differ_in_nothing_but_the_dispatch_of_the_runner(makers):
    found = tally_of(makers, [parse_case(text) for text in CASES])
    assert not found.differences
    known = {difference.field.partition("[")[0] for difference in found.explained}
    assert known <= {"runner_dispatch", "refusal", "ubatch1.num_reqs_after_padding"}
    assert "runner_dispatch" in known
    assert "refusal" in known


def test_lengths_and_slots_under_dcp(makers):
    cases = sample(8, 2, Choice(pcp=(2,), dcp=(2,), interleave=(2,), max_requests=2))
    found = tally_of(makers, cases)
    assert not found.differences
    names = {field.field for field in found.fields if field.num_compared}
    assert {"dcp_local_seq_lens", "slot_mappings", "block_tables.0", "is_padding"} <= names


WHOLE = {
    "global_num_tokens": lambda n: n + 1,
    "global_query_lens_np": lambda lengths: lengths + 1,
    "global_seq_lens_cpu_upper_bound_np": lambda lengths: lengths - 1,
    "dcp_local_seq_lens_cpu_upper_bound": lambda lengths: lengths + 1,
}
"""What a batch carries of whole requests (vLLM 0.33), each with another value than it should."""


@pytest.mark.parametrize("name", WHOLE)
def test_a_wrong_word_about_whole_requests_is_a_difference(makers, api, monkeypatch, name):
    case = parse_case("pcp=2 dcp=2 tp=1 interleave=2 NONE: p9@3+2#2 d1@5#0")
    clean = tally_of(makers, [case])
    assert not clean.differences
    if f"pcp.{name}" not in {field.field for field in clean.fields if field.num_compared}:
        pytest.skip(f"vllm {api.version} carries no {name}")
    real = type(api).pcp_metadata
    monkeypatch.setattr(
        type(api),
        "pcp_metadata",
        lambda self, batch: {
            key: WHOLE[key](value) if key == name else value
            for key, value in real(self, batch).items()
        },
    )
    found = tally_of(makers, [case])
    assert {each.field for each in found.differences} == {f"pcp.{name}"}


@pytest.mark.parametrize(("of", "field"), [("own", "is_padding"), ("all", "pcp.is_padding")])
def test_wrong_flags_are_a_difference(makers, api, monkeypatch, of, field):
    """Those of the rank's own tokens, which it has with expert parallelism, and all ranks'."""
    real = type(api).partition
    case = parse_case("pcp=2 dcp=1 tp=1 interleave=1 NONE: d1@5#0 d1@2#1 d1@3#2")
    assert not tally_of(makers, [case]).differences

    def broken(self, manager, *args):
        batch = real(self, manager, *args)
        flags = batch.is_padding if of == "all" else manager.input_buffers.is_padding
        flags[:1] = True
        return batch

    monkeypatch.setattr(type(api), "partition", broken)
    found = tally_of(makers, [case])
    if of == "all" and field not in {each.field for each in found.fields if each.num_compared}:
        pytest.skip(f"vllm {api.version} has no flags of all ranks' tokens")
    assert {each.field for each in found.differences} == {field}


def test_a_generation_that_replicates_decodes_is_refused_where_it_does(makers, api, monkeypatch):
    makers.check(2, 1)
    monkeypatch.setattr(type(api), "shards_decodes", False)
    makers.check(1, 1)
    makers.check(2, 2)
    with pytest.raises(UsageError, match=rf"--pcp 2 with --dcp 1 .* in vllm {api.version} every"):
        makers.check(2, 1)


def test_a_descriptor_of_a_ranks_rows_is_too_small_for_vllms_global_batch(makers, api):
    """What dispatch with a rank's rows alone would come to; docs/vllm.md says so."""
    if api.generation != "0.33":
        pytest.skip(f"tried with vllm 0.33, and this is {api.version}")
    case = parse_case(
        "pcp=2 dcp=1 tp=1 interleave=1 FULL reqs=2 tokens=2: d1@5#0 d1@2#1 d1@3#2 d1@9#5"
    )
    whole = makers.inputs.whole(case.requests, None)
    assert whole.num_reqs_after_padding == 4
    with pytest.raises(ValueError, match="shape"):
        makers.inputs.whole(case.requests, case.descriptor)


@pytest.mark.parametrize(
    "world",
    [
        "pcp=2 dcp=1 tp=1 interleave=1",
        "pcp=2 dcp=2 tp=1 interleave=2",
        "pcp=1 dcp=2 tp=2 interleave=1",
    ],
)
def test_rows_put_together_are_the_batch_run_whole(makers, monkeypatch, world):
    from pcpbench.targets.vllm import partition

    texts = [text.replace("pcp=2 dcp=1 tp=1 interleave=1", world) for text in CASES[:3]]
    if "dcp=2" in world:  # lengths of microbatches are not put together
        texts = [text.replace(" ubatches=2", "") for text in texts]
    if "pcp=1" in world:  # nor are there requests without tokens
        texts = [text.replace(" p0@4+1#3", "") for text in texts]
    cases = [parse_case(text) for text in texts]
    made = {}
    for whole in (True, False):
        monkeypatch.setattr(partition, "is_whole", lambda case, one_in, whole=whole: whole)
        made[whole] = makers.of(cases[0]).outputs(cases)
    for one, other in zip(made[True], made[False], strict=True):
        for left, right in zip(one.ranks, other.ranks, strict=True):
            assert left.keys() == right.keys()
            for name in left:
                assert np.array_equal(left[name], right[name]), name


def broken_method(monkeypatch, owner, name, spoil):
    """Have spoil change what a method of vLLM's returns."""
    sound = getattr(owner, name)

    def broken(self, *args, **named):
        found = sound(self, *args, **named)
        return spoil(found)

    monkeypatch.setattr(owner, name, broken)


def of_slot_7(batch):
    batch.idx_mapping_np = np.full_like(batch.idx_mapping_np, 7)
    return batch


def test_rows_of_a_request_that_the_batch_lacks_are_a_difference(makers, monkeypatch):
    broken_method(monkeypatch, makers.api.PCPManager, "partition_batch", of_slot_7)
    found = tally_of(makers, [parse_case(CASES[0])])
    assert "row_req_index" in {difference.field for difference in found.differences}


def raising(*args, **named):
    raise AssertionError("a share of nothing")


@pytest.mark.parametrize("name", ["dcp_local_seq_lens", "function"])
def test_what_vllm_raises_behind_the_partition_is_a_difference(makers, monkeypatch, name):
    """A share of lengths, and slices of microbatches; an assert there refuses no batch."""
    case = parse_case("pcp=2 dcp=2 tp=1 interleave=2 NONE ubatches=2: p9@3+2#2 d1@5#0")
    monkeypatch.setattr(type(makers.api), name, raising)
    found = tally_of(makers, [case])
    (difference, *_) = found.differences
    assert difference.field == "refusal"
    assert "AssertionError: a share of nothing" in difference.right_value


def test_a_batch_that_has_to_be_refused_is_not_by_any_error(makers, monkeypatch):
    monkeypatch.setattr(makers.api.PCPManager, "partition_batch", lambda *args: {}["no room"])
    found = tally_of(makers, [parse_case(CASES[4])])
    assert "KeyError: 'no room'" in found.differences[0].right_value


def test_counts_for_dispatch_are_asked_of_every_rank(makers, monkeypatch):
    manager = makers.api.PCPManager
    sound = manager.get_num_tokens_for_dispatch
    monkeypatch.setattr(
        manager,
        "get_num_tokens_for_dispatch",
        lambda self, *args: sound(self, *args) + (self.pcp_rank == 1),
    )
    found = tally_of(makers, [parse_case(CASES[0])])
    (difference,) = found.differences
    assert difference.field == "dispatch_num_tokens"
    assert difference.right_value == "not the same on all ranks"


@pytest.mark.parametrize("whole", [True, False])
def test_shares_of_microbatches_must_be_there_where_their_kernel_runs(makers, monkeypatch, whole):
    from pcpbench.targets.vllm import partition

    def lose(parts):
        for part in parts:
            part.pop("dcp_local_seq_lens", None)
        return parts

    case = parse_case("pcp=2 dcp=2 tp=1 interleave=2 NONE ubatches=2: p9@3+2#2 d1@5#0")
    monkeypatch.setattr(partition, "is_whole", lambda case, one_in: whole)
    broken_method(monkeypatch, partition.Cut, "parts", lose)
    names = {difference.field for difference in tally_of(makers, [case]).differences}
    assert names == ({f"ubatch{n}.dcp_local_seq_lens" for n in (0, 1)} if whole else set())


def test_a_part_that_vllm_does_not_make_is_a_difference(makers, monkeypatch):
    from pcpbench.targets.vllm.cuts import Cut

    broken_method(monkeypatch, Cut, "parts", lambda parts: parts[:1])
    found = tally_of(makers, [parse_case(CASES[0])])
    assert "ubatch1.num_reqs_after_padding" in {each.field for each in found.differences}


def test_a_wrong_restore_index_in_vllm_is_reported(makers, monkeypatch):
    manager = makers.api.PCPManager
    original = manager._build_batch_layout

    def shifted(self, *args, **named):
        found = original(self, *args, **named)
        self._hidden_restore_idx = self._hidden_restore_idx.roll(1)
        return found

    monkeypatch.setattr(manager, "_build_batch_layout", shifted)
    found = tally_of(makers, [parse_case(CASES[1])])
    assert {difference.field for difference in found.differences} == {"hidden_restore_idx"}
