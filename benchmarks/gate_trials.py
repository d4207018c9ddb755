"""How often is the gate wrong? Gates over real processes of the same code, and of slowed code.

Records fresh processes as `pcpbench gate` starts them, in a file that a later call goes on with:
some as they are, some with a slowdown planted in every timed step of the candidate, in turn, so
that both meet the machine in the same moods. Then cuts gates from them in the order of time: each
gate has processes of its own and looks after every one, as the real gate does; 20 gates share a
baseline recorded before them, as a branch shares its main. Prints the table of docs/gate.md.

Run: python benchmarks/gate_trials.py FILE [--gates 200] [--planted 100] [--neighbour]
     python benchmarks/gate_trials.py FILE [FILE ...] --report

--neighbour: beside a process that keeps the other core busy. --report: judge what the files have
(plain or .gz): gates are cut from each file by itself, since ratios of two machines differ.
--no-floors: leave out the kernel floors, which only a `launch` rule needs: processes are shorter.
What they would take is added to the time of a gate all the same. Two recordings at once, each with
a FILE of its own, are each other's neighbours.
"""

from __future__ import annotations

import argparse
import gzip
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pcpbench.checks.gate import Case, Side, is_settled, judge_gate
from pcpbench.engine_options import EngineOptions
from pcpbench.gate_defaults import BASELINE_PROCESSES, DEFAULT_MAX_TIME_S, DEFAULT_PROCESSES
from pcpbench.gate_jobs import SampleJob
from pcpbench.gate_results import GateVerdict, worst
from pcpbench.gate_rules import COUNTS, FULL_SHARE, effective_rules
from pcpbench.gate_samples import JudgedScenario, ProcessSample
from pcpbench.session.processes import sample_once

GATES_OF_A_BASELINE = 20
JUDGING_S, START_S, FLOORS_S = 10.0, 2.5, 1.3
"""Measured: of a gate, until its first process starts; of a process, what is outside its own clock
(2.0 to 3.0 s), and its kernel floors."""
VERDICTS = (
    GateVerdict.REGRESSION,
    GateVerdict.UNDECIDED,
    GateVerdict.PASS,
    GateVerdict.NOT_COMPARABLE,
)
BUSY = "x = list(range(200000))\nwhile True: sum(x)"


class Record(msgspec.Struct, frozen=True):
    """One process. slowdown: planted share."""

    slowdown: float
    sample: ProcessSample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--scenario", action="append", default=[])
    parser.add_argument("--gates", type=int, default=200)
    parser.add_argument("--planted", type=int, default=100)
    parser.add_argument("--slowdown", type=float, default=0.05)
    parser.add_argument("--neighbour", action="store_true")
    parser.add_argument("--no-floors", action="store_true")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if not arguments.report:
        if len(arguments.files) > 1 or arguments.files[0].suffix == ".gz":
            parser.error("a recording goes into one plain file; several are for --report")
        with neighbour(arguments.neighbour):
            record(arguments, arguments.files[0])
    report([read(path) for path in arguments.files], arguments.slowdown)


def read(path: Path) -> list[Record]:
    """What a call recorded; a line that was cut short is left out."""
    data = path.read_bytes() if path.exists() else b""
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    whole = data[: data.rfind(b"\n") + 1]
    return [msgspec.json.decode(line, type=Record) for line in whole.splitlines()]


def record(arguments: argparse.Namespace, path: Path) -> None:
    """Measure until both kinds make up the gates that were asked for."""
    records = read(path)
    whole = b"".join(msgspec.json.encode(each) + b"\n" for each in records)
    path.write_bytes(whole)  # without a line that was cut short
    job = SampleJob(
        base="eager",
        candidate="full",
        options=EngineOptions(),
        scenarios=tuple(arguments.scenario),
    )
    if arguments.no_floors:
        job = msgspec.structs.replace(job, floor_repetitions=0)
    wanted = {0.0: arguments.gates, arguments.slowdown: arguments.planted}
    turn = 0
    with path.open("ab") as stream:
        while True:
            open_kinds = [k for k, num in wanted.items() if len(gates(records, k)) < num]
            if not open_kinds:
                return
            # A planted gate needs baselines, and those come from processes as they are.
            slowdown = open_kinds[turn % len(open_kinds)]
            turn += 1
            sample = sample_once(msgspec.structs.replace(job, slowdown=slowdown))
            records.append(Record(slowdown, sample))
            stream.write(msgspec.json.encode(records[-1]) + b"\n")
            stream.flush()
            if turn % 20 == 0:
                print(f"{len(records)} processes", file=sys.stderr, flush=True)


def gates(records: list[Record], slowdown: float) -> list[tuple[GateVerdict, int, float]]:
    """Every gate that the records make up: verdict, processes, seconds of measuring.

    The last one is left out while more processes could still change it.
    """
    clean = [r.sample for r in records if r.slowdown == 0.0]
    runs = clean if slowdown == 0.0 else [r.sample for r in records if r.slowdown == slowdown]
    found, at = [], 0
    bases: list[list[ProcessSample]] = []
    base_at = 0
    while True:
        if len(found) == GATES_OF_A_BASELINE * len(bases):
            if slowdown == 0.0:
                base, at = clean[at : at + BASELINE_PROCESSES], at + BASELINE_PROCESSES
            else:
                base, base_at = clean[base_at : base_at + BASELINE_PROCESSES], base_at + 40
            if len(base) < BASELINE_PROCESSES:
                return found
            bases.append(base)
        gate = one_gate(bases[-1], runs[at:])
        if gate is None:
            return found
        found.append(gate)
        at += gate[1]


def one_gate(
    baseline: list[ProcessSample], stream: list[ProcessSample]
) -> tuple[GateVerdict, int, float] | None:
    """A gate over the next processes of a stream; None where the stream ends before it does."""
    rules = [r for r in effective_rules([]) if r.metric not in (*COUNTS, FULL_SHARE)]
    judged = tuple(
        JudgedScenario(
            scenario=s.scenario,
            plan_hash=s.plan_hash,
            outcome="pass",
            reasons=(),
            num_drifts=0,
            num_violations=0,
            decode_steps=0,
            steps_full=0,
        )
        for s in baseline[0].scenarios
    )
    today, used_s = datetime.now(UTC).date(), JUDGING_S
    for num, sample in enumerate(stream, start=1):
        used_s += START_S + sample.wall_s + floors_s(sample)
        is_over = used_s + sample.wall_s > DEFAULT_MAX_TIME_S
        if num < DEFAULT_PROCESSES and not is_over:
            continue
        case = Case(
            baseline=Side(tuple(baseline), judged),
            run=Side(tuple(stream[:num]), judged),
            today=today,
        )
        findings = judge_gate(case, rules)
        if is_settled(findings) or is_over:
            return worst(findings), num, used_s
    return None


@contextmanager
def neighbour(asked: bool) -> Iterator[None]:
    """A process that never rests, for the length of the block."""
    if not asked:
        yield
        return
    busy = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        time.sleep(1.0)
        yield
    finally:
        busy.kill()
        busy.wait()


def floors_s(sample: ProcessSample) -> float:
    """Seconds that the kernel floors would have taken besides, where they were left out."""
    has_floors = all(s.metrics["launch"].ratio is not None for s in sample.scenarios)
    return 0.0 if has_floors else FLOORS_S


def report(recordings: Sequence[list[Record]], slowdown: float) -> None:
    """The table of docs/gate.md."""
    names = "regression | undecided | pass | not measured | processes | seconds"
    print(f"| true slowdown | gates | {names} |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for kind in (0.0, slowdown):
        found = [gate for records in recordings for gate in gates(records, kind)]
        if not found:
            continue
        verdicts = [verdict for verdict, _, _ in found]
        shares = " | ".join(f"{100 * verdicts.count(v) / len(found):.1f} %" for v in VERDICTS)
        sizes = sorted(num for _, num, _ in found)
        seconds = sorted(used_s for _, _, used_s in found)
        middle = len(found) // 2
        name = f"{100 * kind:g} %" if kind else "none"
        print(
            f"| {name} | {len(found)} | {shares} | {sizes[middle]} ({sizes[0]} to {sizes[-1]}) | "
            f"{seconds[middle]:.0f} (at most {seconds[-1]:.0f}) |"
        )


if __name__ == "__main__":
    main()
