"""Which finding is the first one, and what a broken contract looks like as two arrays."""

import numpy as np
import pytest

from pcpbench.checks.accusation import first_accusation
from pcpbench.checks.metadata import metadata_difference
from pcpbench.checks.setup import Pair
from pcpbench.records import Difference, Drift, NonFinite, Violation
from pcpbench.results import ArmSummary, Outcome, ScenarioResult

ARMS = ("reference", "eager", "eager_padded[full]", "full")
PAIRS = (
    Pair(kind="partition", arm="eager", twin="reference"),
    Pair(kind="padding", arm="eager_padded[full]", twin="eager"),
    Pair(kind="capture", arm="full", twin="eager_padded[full]"),
)


def arm(name):
    counts = dict.fromkeys(
        ("num_steps", "num_requests", "num_output_tokens", "steps_full", "steps_piecewise",
         "steps_none", "steps_idle", "decode_steps", "coverable", "coverable_full", "real_tokens",
         "padded_tokens"), 1,
    )  # fmt: skip
    return ArmSummary(arm=name, miss_reasons={}, **counts)


def violation(contract, name, step, rank=0, tensor="seq_lens"):
    return Violation(
        contract=contract, arm=name, scenario="s", step=step, rank=rank, tensor=tensor, message="m"
    )


def difference(kind, name, twin, step):
    drift = Drift(
        kind=kind, tensor="hidden", outcome="exceeds_budget", num_elements=4, num_mismatched=2,
        max_abs=1.0, max_rel=1.0, max_ulp=1.0, cosine=0.5,
    )  # fmt: skip
    return Difference(
        kind=kind, arm=name, twin=twin, scenario="s", step=step, rank=None, layer=None,
        tensor="hidden", drift=drift,
    )  # fmt: skip


def first(violations=(), differences=(), non_finite=()):
    result = ScenarioResult(
        scenario="s",
        outcome=Outcome.FAIL,
        reasons=("r",),
        arms=tuple(arm(name) for name in ARMS),
        drifts=(),
        violations=tuple(violations),
        first_differences=tuple(differences),
        non_finite=tuple(non_finite),
    )
    return first_accusation(result, PAIRS)


CAPTURE = difference("capture", "full", "eager_padded[full]", 5)


def test_the_earliest_step_comes_first_whatever_it_is():
    found = first([violation("C1", "full", 3)], [CAPTURE])
    assert (found.finding, found.contract, found.step) == ("contract", "C1", 3)
    assert (found.kind, found.twin) == ("capture", "eager_padded[full]")
    assert found.last_step == 5, "where the outputs left each other"


def test_in_one_step_a_drift_comes_first_then_the_lower_rung():
    found = first([violation("C4", "eager", 5), violation("C13", "full", 5)], [CAPTURE])
    assert (found.finding, found.arm, found.contract) == ("drift", "full", "C13")
    found = first([violation("C1", "full", 5), violation("C1", "eager", 5)])
    assert (found.arm, found.twin, found.kind) == ("eager", "reference", "partition")


def test_an_arm_without_a_twin_stands_alone():
    found = first(non_finite=[NonFinite("reference", 2, "hidden", 7)])
    assert (found.finding, found.twin, found.kind, found.step) == ("non_finite", None, "", 2)
    assert "row 7" in found.message


def test_outputs_that_the_next_step_changes_need_that_step():
    found = first([violation("C14", "full", 3, tensor="sampled")])
    assert (found.step, found.last_step) == (3, 4)


def test_nothing_found_accuses_nobody():
    assert first() is None


@pytest.mark.parametrize(
    ("tensor", "field", "index"),
    [
        ("seq_lens", "seq_lens", (0,)),
        ("slot_mappings", "slot_mappings", (0, 1)),
        ("input_ids", "input_ids", (1,)),
        ("is_padding", "is_padding", (0,)),
        ("gathered_kv_write_mask", "gathered_kv_write_mask", (1,)),
    ],
)
def test_a_metadata_violation_brings_both_sides(kit, tensor, field, index):
    bench = kit.Bench(kit.make_plan([5, 3], 1), kit.setup(pcp=2))
    _, expected, record = bench.at(0)
    array = np.array(getattr(record.ranks[1], field))
    array[index] = ~array[index] if array.dtype == bool else array[index] + 3
    wrong = kit.change_rank(record, 1, **{field: array})
    broken = violation("C1", "eager", 0, rank=1, tensor=tensor)
    found = metadata_difference(broken, wrong, expected)
    assert found.difference.first_index == index
    assert found.difference.num_mismatched == 1
    assert found.difference.where == (0, 1, None, "", tensor)
    assert np.array_equal(found.found, array)


def test_unread_table_columns_are_no_difference_and_real_ones_are(kit):
    bench = kit.Bench(kit.make_plan([5, 3], 1), kit.setup())
    _, expected, record = bench.at(0)
    table = record.ranks[0].block_tables[0].copy()
    broken = violation("C5", "eager", 0, tensor="block_tables")
    assert metadata_difference(broken, record, expected).found is None
    table[1, 0] = 77
    found = metadata_difference(broken, kit.change_rank(record, 0, block_tables=(table,)), expected)
    assert (found.difference.first_index, found.difference.found) == ((1, 0), ("77",))


def test_what_is_no_array_is_told_by_its_message(kit):
    bench = kit.Bench(kit.make_plan([5, 3], 1), kit.setup())
    _, expected, record = bench.at(0)
    found = metadata_difference(violation("C8", "full", 0, None, "rank0.x"), record, expected)
    assert (found.difference.message, found.found) == ("m", None)
