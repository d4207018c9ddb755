"""C19 on whose turn it is: who is admitted next, who is preempted (docs/scenarios.md).

Owns the queue as the rules make it: requests come in the order of their arrival, and of the
scenario's file where they arrive in one step; who is preempted stands at its head again. When
blocks are so scarce that somebody must be preempted is not judged, nor how soon room is used; and
requests stand within a step as the target likes them (`Target.arrange`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pcpbench.plan import ScenarioPlan, StepPlan, has_arrived


class QueueAudit:
    """Follows arrivals, admissions and preemptions step by step.

    A plan that does not say which requests its scenario has is not looked at.
    """

    def __init__(self, plan: ScenarioPlan) -> None:
        self._arrivals_s = plan.arrivals_s
        self._coming = [request.req_id for request in plan.requests]
        self._is_known = bool(self._coming)
        self._waiting: deque[str] = deque()
        self._running: list[str] = []
        self._preempted: set[str] = set()

    def leave(self, step: StepPlan) -> Iterator[str]:
        """Arrivals, then those that leave; a preempted request is the one admitted last."""
        arrived = [
            name
            for name in self._coming
            if has_arrived(self._arrivals_s.get(name, 0.0), step.time_s)
        ]
        self._coming = [name for name in self._coming if name not in set(arrived)]
        self._waiting.extend(arrived)
        for name in step.finished_req_ids:
            self._drop(name)
        for name in step.preempted_req_ids:
            if name in self._running and self._running[-1] != name:
                last = self._running[-1]
                yield f"request {name} is preempted, and request {last} was admitted after it"
            self._drop(name)
            self._waiting.appendleft(name)
            self._preempted.add(name)

    def admit(self, step: StepPlan) -> Iterator[tuple[str, str]]:
        """(request, what is wrong with its admission)."""
        for new in step.new_requests:
            if step.preempted_req_ids:
                victim = step.preempted_req_ids[0]
                yield new.req_id, f"is admitted in a step that preempts request {victim}"
            if new.req_id in self._waiting:
                first = self._waiting[0]
                if first != new.req_id and self._is_known:
                    why = "was preempted and is first" if first in self._preempted else "came first"
                    yield new.req_id, f"is admitted before request {first}, which {why}"
                self._waiting.remove(new.req_id)
            self._preempted.discard(new.req_id)
            self._running.append(new.req_id)

    def _drop(self, name: str) -> None:
        if name in self._running:
            self._running.remove(name)
