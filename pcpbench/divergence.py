"""Where an arm first left its twin: the frozen finding that session builds and reports render.

Owns the shape of a finding. Values are text (`0.125`, `nan`), so that no format loses them; the
arrays themselves are in a bundle's `values.npz`. Knows no engine and no file.
"""

from __future__ import annotations

import msgspec

from pcpbench.plan import StepPlan


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of the accused arm beside what it should have been.

    layer: None outside the layers. op: the operation that made it, "" for metadata.
    against: the label of the twin, `plan` for metadata. step: where it was seen.
    first_index: of the first element that differs (found), in a tensor without padding rows.
    place: whose row that is, in words. max_abs: None where a side is not finite or not a number.
    found, expected: the first few elements that differ. num_non_finite: NaN and inf among found.
    message: what the judge said of it, "" for a tap.
    """

    step: int
    rank: int | None
    layer: int | None
    op: str
    tensor: str
    against: str
    num_elements: int = 0
    num_mismatched: int = 0
    first_index: tuple[int, ...] = ()
    place: str = ""
    max_abs: float | None = None
    found: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    num_non_finite: int = 0
    message: str = ""

    @property
    def where(self) -> tuple[int, int | None, int | None, str, str]:
        """What two findings of one place have in common."""
        return self.step, self.rank, self.layer, self.op, self.tensor


class KvOrigin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first KV slot that an arm wrote wrongly.

    what: `non-finite`, `wrong` (not what the twin holds there), `unplanned` (a slot that the plan
    does not let this step write). tensor: `kv_cache` or `index_cache`, whose layer it is. phase:
    `prefill`, `decode` or `dummy`. req_id, position: whose token the slot holds, None for a slot
    that belongs to no request. found, expected: the first few values of the slot that differ.
    """

    what: str
    phase: str
    step: int
    rank: int
    layer: int
    slot: int
    block: int
    req_id: str | None = None
    position: int | None = None
    found: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    tensor: str = "kv_cache"


class Accusation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The judge's earliest finding in a scenario.

    finding: `drift`, `contract` or `non_finite`. kind: of the drift between the arm and its twin;
    twin None and kind "" for an arm without one. contract: its id, "" where none was broken.
    last_step: the last step to look at: where the pair's outputs left each other, if later.
    """

    finding: str
    kind: str
    arm: str
    twin: str | None
    step: int
    last_step: int
    rank: int | None
    layer: int | None
    tensor: str
    contract: str
    message: str


class Divergence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first difference of one failed scenario.

    accusation: what made the scenario fail. reproduced: `with taps`, `without taps` or `no`: how a
    run of the two arms alone showed it again. metadata: a tensor that broke a contract; tap: the
    first tap point past what the pair may differ; judged: the output that the judge measured.
    kv: where KV first went wrong. plan, ran_as, twin_ran_as: of the step. fault: injected, or "".
    bundle: its directory, "" where none was written.
    """

    scenario: str
    accusation: Accusation
    reproduced: str
    metadata: TensorDifference | None = None
    tap: TensorDifference | None = None
    judged: TensorDifference | None = None
    kv: KvOrigin | None = None
    plan: StepPlan | None = None
    ran_as: str = ""
    twin_ran_as: str = ""
    fault: str = ""
    bundle: str = ""

    @property
    def first(self) -> TensorDifference | None:
        """The first difference: broken metadata comes before what was computed from it."""
        found = [d for d in (self.metadata, self.tap, self.judged) if d is not None]
        return min(found, key=lambda difference: difference.step, default=None)

    def is_at(self, other: Divergence) -> bool:
        """Whether both name the same step, rank, layer, op and tensor."""
        left, right = self.first, other.first
        return left is not None and right is not None and left.where == right.where
