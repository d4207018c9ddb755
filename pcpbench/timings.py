"""What was timed of a step, in seconds; only reports choose units.

Owns frozen records of times. What the step computed is in records.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Host times of one step of one arm in one repetition, in seconds.

    wall_s: preparation, forward pass and sampling of all ranks that this process runs.
    submit_s: the part until the last launch call returned (equals wall_s on a CPU).
    kernel_s: kernel floor, measured right after the step; None for a step without that.
    """

    arm: str
    scenario: str
    step: int
    repetition: int
    wall_s: float
    submit_s: float
    kernel_s: float | None = None

    def launch_s(self, async_device: bool) -> float | None:
        """Launch overhead (SPEC 13): what the host took to issue the step.

        A device that runs behind the host: until the last launch call returned. A CPU: wall time
        less kernel floor, which may come out negative where there is nothing to see.
        """
        if async_device:
            return self.submit_s
        return None if self.kernel_s is None else self.wall_s - self.kernel_s


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured time of one arm, in seconds, before any statistic.

    measure: `tpot`, `itl`, `ttft` (of a request), `step`, `kernel` or `launch_overhead` (of a
    step). request: whose, None for a step's. step: the step itself, or the one that ended an `itl`;
    None for a whole request's.
    """

    arm: str
    repetition: int
    measure: str
    request: str | None
    step: int | None
    value_s: float


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One stretch of a step of one arm.

    name: `step`, or a part of it: `update_states`, `prepare_inputs`, `dispatch`,
    `prepare_attention`, `forward`, `replay`, `launch`, `sample`, `post_update`, `draft` (all passes
    of a draft model). rank: whose, None for what is done for all ranks at once. start_s: since the
    traced pass of the scenario began.
    """

    arm: str
    step: int
    name: str
    rank: int | None
    start_s: float
    duration_s: float
