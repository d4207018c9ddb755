"""A bundle goes to disk and comes back as it was."""

import numpy as np
import pytest

from pcpbench.divergence import Accusation, Divergence, KvOrigin, TensorDifference
from pcpbench.engine_options import EngineOptions
from pcpbench.errors import UsageError
from pcpbench.records import Environment
from pcpbench.session.bundle import bundle_files, make_bundle, read_bundle
from pcpbench.session.case import Case

ACCUSATION = Accusation(
    finding="drift", kind="capture", arm="full", twin="eager_padded[full]", step=1, last_step=1,
    rank=None, layer=None, tensor="hidden", contract="C13", message="m",
)  # fmt: skip
TAP = TensorDifference(
    step=1, rank=0, layer=1, op="mlp", tensor="hidden", against="eager_padded[full]",
    num_elements=8, num_mismatched=2, first_index=(0, 3), place="request r0, position 4",
    found=("nan", "0.1"), expected=("1.0", "0.2"), num_non_finite=1,
)  # fmt: skip
KV = KvOrigin(
    what="wrong", phase="decode", step=1, rank=0, layer=1, slot=9, block=2, req_id="r0", position=4
)


@pytest.fixture
def bundle(bench):
    plan = bench("s2-capture-edges").plan
    finding = Divergence(
        scenario=plan.scenario, accusation=ACCUSATION, reproduced="with taps", tap=TAP, kv=KV,
        plan=plan.steps[1],
    )  # fmt: skip
    tokens = tuple(
        tuple(range(sum(request.samples for request in step.scheduled))) for step in plan.steps[:2]
    )
    case = Case(
        options=EngineOptions(capture_sizes="1,2,4", device="cpu", backend="host"),
        base="eager", candidate="full", accusation=ACCUSATION, plan=plan, tokens=tokens,
        fault="stale-padded-seq-lens",
    )  # fmt: skip
    return make_bundle(case, finding, Environment(versions={"torch": "2.13"}))


def write(path, bundle, **arrays):
    for name, data in bundle_files(bundle, arrays).items():
        (path / name).write_bytes(data)


def test_what_was_written_is_what_is_read(bundle, tmp_path):
    found = np.array([[np.nan, np.inf, 0.1]], np.float32)
    write(tmp_path, bundle, tap_found=found, kv_found=np.arange(3))
    assert read_bundle(tmp_path) == bundle
    with np.load(tmp_path / "values.npz") as values:
        assert values["tap_found"].tobytes() == found.tobytes()
        assert set(values.files) == {"tap_found", "kv_found"}


def test_first_is_the_earliest_and_metadata_comes_before_what_follows_from_it(bundle):
    finding = bundle.finding
    assert finding.first is TAP
    metadata = TensorDifference(
        step=1, rank=0, layer=None, op="", tensor="seq_lens", against="plan"
    )
    at_once = Divergence(
        scenario="s", accusation=ACCUSATION, reproduced="with taps", tap=TAP, metadata=metadata
    )
    assert at_once.first is metadata
    assert not at_once.is_at(finding)
    assert finding.is_at(finding)


def test_a_pickle_in_the_values_is_not_read(bundle, tmp_path):
    write(tmp_path, bundle)
    np.savez(tmp_path / "values.npz", tap_found=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UsageError, match=r"values\.npz next to it cannot be read"):
        read_bundle(tmp_path)
