"""The first difference on a console and as JSON: place, both sides' values, plan, KV, replay.

Owns the words for a finding and the whole report of `pcpbench repro`. Judges nothing.
"""

from __future__ import annotations

import shlex
from typing import TextIO

import msgspec
from rich.console import Console

from pcpbench import __version__
from pcpbench.divergence import Divergence, KvOrigin, TensorDifference
from pcpbench.plan import StepPlan
from pcpbench.report import units
from pcpbench.report.console import Facts, verdict_line
from pcpbench.report.json_out import print_text
from pcpbench.report.manifest import SCHEMA_VERSION
from pcpbench.report.plain import to_json
from pcpbench.results import Outcome

SHOWN_VALUES = 4
SHOWN_REQUESTS = 6
ADDRESS = " at 0x"


class ReproResult(msgspec.Struct, frozen=True, kw_only=True):
    """One `pcpbench repro`.

    recorded: the bundle's finding. found: this run's; None where the arms could not even be built,
    and `cause` says why. changes: what is not as it was when the bundle was made. fault: what this
    run injected, "" for nothing; num_hits: how often that acted.
    """

    bundle: str
    recorded: Divergence
    found: Divergence | None
    cause: str = ""
    changes: tuple[str, ...] = ()
    fault: str = ""
    num_hits: int = 0

    @property
    def diverges(self) -> bool:
        """Whether the two arms part again."""
        return self.found is None or self.found.reproduced != "no"

    @property
    def why_nothing(self) -> str:
        """Why it says nothing that they do not part; "" where it does, or where they part."""
        if self.diverges:
            return ""
        if self.fault and not self.num_hits:
            return f"the planted fault {self.fault} never acted in this run"
        if self.recorded.reproduced == "no":
            return "it never showed in a run of the two arms alone, nor when the bundle was made"
        return ""

    @property
    def outcome(self) -> Outcome:
        """FAIL if they part, PASS if they do not any more and that says something."""
        if self.diverges:
            return Outcome.FAIL
        return Outcome.NOT_COMPARED if self.why_nothing else Outcome.PASS

    @property
    def exit_code(self) -> int:
        """1 if they part; 0 if they do not any more; 3 where that says nothing."""
        return self.outcome.exit_code


def print_repro(result: ReproResult, console: Console) -> None:
    """The verdict in a sentence, then the same facts that the comparison showed."""
    verdict_line(console, result.outcome, repro_text(result))
    facts = Facts()
    shown = result.recorded if result.found is None or not result.diverges else result.found
    label = "First difference" if result.diverges else "Was recorded"
    facts.add("Injected", _injected(result))
    add_divergence(facts, shown, label)
    facts.add_all("Changed since", result.changes)
    facts.print(console)


def print_repro_json(result: ReproResult, stream: TextIO | None = None) -> None:
    """One JSON object on stdout (or a stream)."""
    head = {
        "schema_version": SCHEMA_VERSION,
        "pcpbench_version": __version__,
        "command": "repro",
        "exit_code": result.exit_code,
        "diverges": result.diverges,
        "summary": repro_text(result),
    }
    print_text(to_json({**head, **msgspec.structs.asdict(result)}), stream)


def repro_text(result: ReproResult) -> str:
    """The verdict in one sentence."""
    recorded, found = result.recorded, result.found
    pair = pair_text(recorded)
    if found is None:
        return f"{recorded.scenario}: {pair}: it broke off: {result.cause}"
    if result.why_nothing:
        why = result.why_nothing
        return f"{recorded.scenario}: {pair}: it does not diverge, but {why}, so this says nothing."
    if not result.diverges:
        return f"{recorded.scenario}: {pair}: it does not diverge any more."
    if found.broke_off:
        again = ", as recorded" if recorded.is_at(found) else ""
        return f"{recorded.scenario}: {pair}: it broke off{again}: C0, {found.broke_off}"
    if recorded.is_at(found):
        return f"{recorded.scenario}: {pair}: it diverges again, at the same place."
    return f"{recorded.scenario}: {pair}: it diverges again, at another place than recorded."


def _injected(result: ReproResult) -> str:
    """What was injected now, and whether that is what was injected then."""
    now, then = result.fault, result.recorded.fault
    if now == then:
        return f"the fault {now}, as when the bundle was made" if now else ""
    was = f"the fault {then}" if then else "nothing"
    return f"{f'the fault {now}' if now else 'nothing'}; when the bundle was made it was {was}"


def add_divergence(facts: Facts, divergence: Divergence, label: str = "First difference") -> None:
    """Place and values, the tap behind a broken contract, KV, plan and how to replay it."""
    first = divergence.first
    if first is not None:
        accused = f"{pair_text(divergence)}: "
        facts.add(label, accused + difference_text(first), style="bold")
        add_values(facts, first)
    for name, other in (("First tap", divergence.tap), ("First output", divergence.judged)):
        if other is not None and other is not first and other.op:
            facts.add(name, difference_text(other))
            if other is divergence.tap:
                add_values(facts, other)
    if divergence.broke_off and divergence.judged is not first:
        facts.add("Broke off", f"C0, {divergence.broke_off}", style="bold")
    if divergence.kv is not None:
        facts.add("First bad KV", kv_text(divergence.kv))
    _add_surroundings(facts, divergence)


def _add_surroundings(facts: Facts, divergence: Divergence) -> None:
    """What the step was, how surely it was found, and how to run into it again."""
    if divergence.plan is not None:
        facts.add("Plan", plan_text(divergence.plan))
    if divergence.ran_as:
        twin = f", {divergence.accusation.twin} as {divergence.twin_ran_as}"
        ran = f"{divergence.accusation.arm} as {divergence.ran_as}"
        facts.add("Ran as", ran + (twin if divergence.twin_ran_as else ""))
    if divergence.reproduced == "without taps":
        facts.add("Taps", "with taps it did not show again; it did in a run of the two arms "
                  "without them, so the place is that of the judge")  # fmt: skip
    elif divergence.reproduced == "no":
        facts.add("Not reproduced", "in a run of the two arms alone it did not show again; the "
                  "place is that of the first run")  # fmt: skip
    if divergence.bundle:
        facts.add("Replay it", f"pcpbench repro {shlex.quote(divergence.bundle)}")


def pair_text(divergence: Divergence) -> str:
    """`full against eager_padded[full]`, or the arm alone."""
    accusation = divergence.accusation
    against = "" if accusation.twin is None else f" against {accusation.twin}"
    return f"{accusation.arm}{against}"


def difference_text(difference: TensorDifference) -> str:
    """One sentence: step, rank, layer, op and tensor, how many values differ, where first."""
    parts = [f"step {difference.step}"]
    parts += [] if difference.rank is None else [f"rank {difference.rank}"]
    parts += [] if difference.layer is None else [f"layer {difference.layer}"]
    name = f"{difference.op} -> {difference.tensor}" if difference.op else difference.tensor
    message = difference.message
    if ADDRESS in message:  # those that the first run was accused of are other ones
        message += " (addresses are those of a second run, of the two arms alone)"
    if message and message.startswith(difference.tensor):
        return f"{', '.join(parts)}: {message}"
    text = f"{', '.join(parts)}, {name}"
    if message:
        return f"{text}: {message}"
    count = f"{difference.num_mismatched:,} of {difference.num_elements:,} values"
    if not difference.expected:
        return f"{text}: {count} are not finite{_place(difference)}"
    size = "" if difference.max_abs is None else f", max abs {units.small(difference.max_abs)}"
    bad = difference.num_non_finite
    size += f", {bad:,} not finite" if bad else ""
    return f"{text}: {count} differ from {difference.against}{size}{_place(difference)}"


def add_values(facts: Facts, difference: TensorDifference) -> None:
    """The first few values that differ, side by side."""
    for label, values in (("found", difference.found), ("expected", difference.expected)):
        if values:
            more = ", ..." if len(values) > SHOWN_VALUES else ""
            facts.add("", f"{label:<8}  {', '.join(values[:SHOWN_VALUES])}{more}")


def kv_text(kv: KvOrigin) -> str:
    """Where KV first went wrong, in one sentence."""
    owner = f"request {kv.req_id}, position {kv.position}" if kv.req_id else "no request's"
    words = {"unplanned": "written though the plan does not name it", "wrong": "written wrongly"}
    what = words.get(kv.what, "holds non-finite values")
    layer = f"layer {kv.layer}" + (" index cache" if kv.tensor == "index_cache" else "")
    return (
        f"{kv.phase}, step {kv.step}, rank {kv.rank}, {layer}, slot {kv.slot} (block "
        f"{kv.block}; {owner}): {what}"
    )


def plan_text(step: StepPlan) -> str:
    """What the step's batch is: `step 7: r0 decodes 1 token at 17; r2 prefills 5 tokens at 0`."""
    if not step.scheduled:
        return f"step {step.index}: idle"
    parts = []
    for request in step.scheduled[:SHOWN_REQUESTS]:
        verb = "prefills" if request.is_prefilling else "decodes"
        count = units.count(request.num_scheduled_tokens, "token")
        parts.append(f"{request.req_id} {verb} {count} at {request.num_computed_tokens}")
    rest = len(step.scheduled) - len(parts)
    parts += [f"and {units.count(rest, 'request')} more"] if rest else []
    return f"step {step.index}: {'; '.join(parts)}"


def _place(difference: TensorDifference) -> str:
    if not difference.first_index:
        return ""
    index = ", ".join(str(axis) for axis in difference.first_index)
    owner = f" ({difference.place})" if difference.place else ""
    return f"; first at [{index}]{owner}"
