"""Every field that makers are compared by is seen when it breaks; only what is known is known."""

from dataclasses import replace

import numpy as np
import pytest

from pcpbench.checks.partition_compare import Tally
from pcpbench.checks.partition_known import explain, may_lack
from pcpbench.checks.partition_oracle import expected_outputs
from pcpbench.partition_cases import parse_case
from pcpbench.partition_results import REFUSED, PartitionOutputs

CASE = parse_case(
    "pcp=2 dcp=2 tp=1 interleave=2 FULL reqs=5 tokens=6 ubatches=2: d1@5#0 d3@4#3 d1@9#6"
)
MIXED = parse_case("pcp=2 dcp=1 tp=1 interleave=1 NONE: d1@5#0 d1@2#1 d1@3#2 p5@4+2#3")
SHORT_OF_ROWS = parse_case(
    "pcp=2 dcp=1 tp=1 interleave=1 FULL reqs=1 tokens=2: d1@5#0 d1@2#1 d1@3#2"
)


def tally_of(case, **outputs):
    tally = Tally("test", explain, may_lack)
    tally.compare(str(case), case.group, {"oracle": expected_outputs(case), **outputs}, case)
    return tally.result({}, 0.0)


def broken(case, field, rank=0, change=None):
    """The expected outputs with one field of one rank (None: of the step) changed."""
    good = expected_outputs(case)
    where = dict(good.step if rank is None else good.ranks[rank])
    where[field] = (change or spoil)(where[field])
    if rank is None:
        return replace(good, step=where)
    ranks = list(good.ranks)
    ranks[rank] = where
    return replace(good, ranks=tuple(ranks))


def spoil(value):
    if isinstance(value, np.ndarray):
        changed = value.copy()
        changed.flat[-1] = not changed.flat[-1] if value.dtype == np.bool_ else value.flat[-1] + 1
        return changed
    return value + 7 if isinstance(value, int) else value + "!"


FIELDS = [
    (rank, field)
    for rank, fields in ((0, expected_outputs(CASE).ranks[0]), (None, expected_outputs(CASE).step))
    for field in fields
]


def test_the_oracle_makes_every_field_that_is_compared():
    names = {field for _, field in FIELDS}
    assert names >= {
        "num_reqs", "num_reqs_after_padding", "num_tokens", "num_tokens_after_padding",
        "query_start_loc", "seq_lens", "positions", "input_ids", "is_padding",
        "hidden_restore_idx", "padded_gather_idx", "gathered_kv_write_mask",
        "row_req_index", "row_start", "block_tables.0", "slot_mappings", "dcp_local_seq_lens",
        "ubatch0.seq_lens", "ubatch1.dcp_local_seq_lens", "dispatch_num_tokens",
        "dispatch[full_and_piecewise]", "runner_dispatch[full_decode_only,k=2]",
    }  # fmt: skip


@pytest.mark.parametrize(("rank", "field"), FIELDS, ids=[f"{r}-{f}" for r, f in FIELDS])
def test_a_field_that_is_broken_is_reported(rank, field):
    found = tally_of(CASE, builtin=broken(CASE, field, rank))
    assert [(d.field, d.rank, d.right) for d in found.differences] == [(field, rank, "builtin")]
    assert str(CASE) == found.differences[0].case
    assert sum(g.num_different for g in found.groups) == 1


@pytest.mark.parametrize(("rank", "field"), FIELDS, ids=[f"{r}-{f}" for r, f in FIELDS])
def test_no_known_reason_covers_a_value_that_is_merely_wrong(rank, field):
    found = tally_of(CASE, vllm=broken(CASE, field, rank))
    assert [(d.field, d.rank) for d in found.differences] == [(field, rank)]
    assert not found.explained


def test_equal_outputs_differ_in_nothing_between_any_two():
    good = expected_outputs(CASE)
    found = tally_of(CASE, builtin=good, vllm=good)
    assert not found.differences
    pairs = {(f.left, f.right) for f in found.fields}
    assert pairs == {("oracle", "builtin"), ("oracle", "vllm"), ("builtin", "vllm")}
    counts = {f.num_compared for f in found.fields if f.field == "seq_lens"}
    assert counts == {2}  # ranks


def test_two_makers_that_agree_on_what_is_wrong_are_not_each_others_difference():
    wrong = broken(CASE, "seq_lens")
    found = tally_of(CASE, builtin=wrong, vllm=wrong)
    assert [(d.left, d.right) for d in found.differences] == [
        ("oracle", "builtin"),
        ("oracle", "vllm"),
    ]


def without(field):
    good = expected_outputs(CASE)
    less = {name: value for name, value in good.ranks[0].items() if name != field}
    return replace(good, ranks=(less, good.ranks[1]))


OWN = [field for rank, field in FIELDS if rank == 0 and not field.startswith("pcp.")]
"""What the engine has to give of rank 0; of whole requests only vLLM carries something."""


@pytest.mark.parametrize("field", OWN)
def test_a_field_that_the_engine_lacks_is_a_difference(field):
    found = tally_of(CASE, builtin=without(field))
    assert [(d.rank, d.field, d.right_value) for d in found.differences] == [(0, field, "absent")]


def test_a_field_that_nobody_expects_is_a_difference():
    good = expected_outputs(CASE)
    more = {**good.ranks[0], "surplus": 3}
    found = tally_of(CASE, builtin=replace(good, ranks=(more, good.ranks[1])))
    assert [(d.rank, d.field, d.left_value) for d in found.differences] == [
        (0, "surplus", "absent")
    ]


@pytest.mark.parametrize("field", ["ubatch0.slot_mappings", "ubatch1.block_tables.0"])
def test_what_vllm_has_no_function_for_is_counted_as_missing(field):
    found = tally_of(CASE, vllm=without(field))
    assert not found.differences
    (count,) = [f for f in found.fields if f.field == field]
    assert (count.num_compared, count.num_missing) == (1, 1)


def test_what_a_composed_batch_does_not_run_is_missing_there_and_nowhere_else():
    field = "ubatch1.dcp_local_seq_lens"
    assert not tally_of(CASE, vllm=replace(without(field), is_composed=True)).differences
    for maker, outputs in (
        ("vllm", without(field)),
        ("vllm", replace(without("ubatch1.seq_lens"), is_composed=True)),
        ("builtin", replace(without(field), is_composed=True)),
    ):
        assert len(tally_of(CASE, **{maker: outputs}).differences) == 1


@pytest.mark.parametrize("field", ["slot_mappings", "dcp_local_seq_lens", "ubatch0.seq_lens"])
def test_what_vllm_has_to_give_is_a_difference_when_it_does_not(field):
    assert [d.field for d in tally_of(CASE, vllm=without(field)).differences] == [field]


@pytest.mark.parametrize(
    "value",
    [np.array([1, 2, 3, 4]), np.zeros((2, 2)), np.ones(3, dtype=np.bool_), "no array"],
    ids=["longer", "another shape", "another kind", "a word"],
)
def test_another_shape_or_kind_is_a_difference(value):
    case = parse_case("pcp=2 dcp=1 tp=1 interleave=1 NONE: d1@5#0 d1@2#1 d1@3#2")
    found = tally_of(case, builtin=broken(case, "query_start_loc", change=lambda _: value))
    assert [d.field for d in found.differences] == ["query_start_loc"]


def refusing(case, *ranks):
    good = expected_outputs(replace_mode(case))
    return PartitionOutputs(
        ranks=tuple(
            {"refusal": REFUSED} if rank in ranks else fields
            for rank, fields in enumerate(good.ranks)
        ),
        step=expected_outputs(case).step,
    )


def replace_mode(case):
    """The same batch unpadded, which nobody refuses."""
    return parse_case(str(case).replace("FULL reqs=1 tokens=2", "NONE"))


def test_a_batch_that_has_to_be_refused_and_is_taken_is_a_difference():
    found = tally_of(SHORT_OF_ROWS, builtin=refusing(SHORT_OF_ROWS))
    assert [(d.rank, d.field) for d in found.differences] == [(0, "refusal"), (1, "refusal")]
    assert found.groups[0].num_refused == 1


def test_a_batch_that_has_to_be_taken_and_is_refused_is_a_difference():
    found = tally_of(MIXED, builtin=refusing(MIXED, 1))
    assert [(d.rank, d.field) for d in found.differences] == [(1, "refusal")]


def test_an_error_that_is_no_refusal_is_not_taken_for_one():
    outputs = refusing(SHORT_OF_ROWS, 0, 1)
    odd = ({"refusal": "IndexError: 7"}, outputs.ranks[1])
    found = tally_of(SHORT_OF_ROWS, builtin=replace(outputs, ranks=odd))
    assert [(d.rank, d.right_value) for d in found.differences] == [(0, "IndexError: 7")]


def test_vllm_may_take_a_batch_on_the_rank_that_has_the_rows_and_on_no_other():
    small = tally_of(SHORT_OF_ROWS, vllm=refusing(SHORT_OF_ROWS, 0))
    assert not small.differences
    assert list(small.reasons.values()) == [1]
    large = tally_of(SHORT_OF_ROWS, vllm=refusing(SHORT_OF_ROWS, 1))
    assert [d.rank for d in large.differences] == [0]


def test_what_vllms_runner_chooses_by_global_rows_is_known_and_any_other_choice_is_not():
    name = "runner_dispatch[full_and_piecewise]"
    known = broken(MIXED_DECODES, name, None, lambda _: "PIECEWISE[tokens=2]")
    found = tally_of(MIXED_DECODES, vllm=known)
    assert not found.differences
    assert [d.field for d in found.explained] == [name]
    wrong = broken(MIXED_DECODES, name, None, lambda _: "PIECEWISE[tokens=4]")
    assert [d.field for d in tally_of(MIXED_DECODES, vllm=wrong).differences] == [name]
    ours = tally_of(MIXED_DECODES, builtin=known)
    assert [d.field for d in ours.differences] == [name]


MIXED_DECODES = parse_case("pcp=2 dcp=1 tp=1 interleave=1 NONE: d1@5#0 d1@2#1 d1@3#2 d1@3#4")
PADDED = parse_case("pcp=1 dcp=1 tp=1 interleave=1 PIECEWISE tokens=4: d1@5#0 d1@2#1")


@pytest.mark.parametrize("field", ["input_ids", "positions"])
def test_stale_padding_tokens_of_vllm_are_known_and_wrong_real_ones_are_not(field):
    stale = tally_of(PADDED, vllm=broken(PADDED, field))
    assert not stale.differences
    assert len(stale.explained) == 1

    def first(values):
        changed = values.copy()
        changed[0] += 1
        return changed

    assert tally_of(PADDED, vllm=broken(PADDED, field, change=first)).differences
    under_pcp = parse_case("pcp=2 dcp=2 tp=1 interleave=1 PIECEWISE tokens=4: d1@5#0 d1@2#1")
    assert tally_of(under_pcp, vllm=broken(under_pcp, field)).differences
