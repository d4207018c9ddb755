"""An arm whose failures are told with their step, in passes whose own errors name no place.

Owns that and nothing else; who is told accuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pcpbench.errors import MeasuredFailure
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.targets.protocol import Arm


class PlacedArm:
    """An arm in a pass whose errors name no place: its failures are told with their step.

    Nothing stands between the clock and the arm but one call.
    """

    def __init__(self, arm: Arm, accuse: Callable[[Arm, StepPlan, MeasuredFailure], None]) -> None:
        self._arm, self._accuse = arm, accuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arm, name)

    def start(self, plan: ScenarioPlan) -> None:
        """Begin a scenario; a failure is one of its first step."""
        try:
            self._arm.start(plan)
        except MeasuredFailure as failure:
            self._accuse(self._arm, plan.steps[0], failure)
            raise

    def execute(self, step: StepPlan, *fed: Sequence[int] | None) -> None:
        """Run one step."""
        try:
            self._arm.execute(step, *fed)
        except MeasuredFailure as failure:
            self._accuse(self._arm, step, failure)
            raise

    def execute_watched(self, step: StepPlan, *given: Any) -> Any:
        """Run one step and tell its phases."""
        try:
            return self._arm.execute_watched(step, *given)
        except MeasuredFailure as failure:
            self._accuse(self._arm, step, failure)
            raise
