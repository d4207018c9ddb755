"""A comparison read back from disk: its scenarios and arms, and the rows of each.

Owns what may be told of a run on disk: a scenario counts once its rows in `summary.csv` are there,
and times are handed out for scenarios that passed only (HOUSE rule 9). Draws nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pcpbench.report.arms import base_arm
from pcpbench.report.stored import Row, StoredRun

PASS = "pass"


@dataclass(frozen=True)
class StoredScenario:
    """One finished scenario. arms: its rows in `summary.csv`, in their order."""

    name: str
    arms: tuple[Row, ...]

    @property
    def outcome(self) -> str:
        """`pass`, `fail` or `not compared`."""
        return self.arms[0].text("outcome")

    @property
    def passed(self) -> bool:
        """Whether its times may be shown."""
        return self.outcome == PASS

    def row(self, role: str) -> Row | None:
        """The row of `base` or `candidate`."""
        return next((row for row in self.arms if row.text("role") == role), None)


@dataclass(frozen=True)
class StoredCompare:
    """A run of `compare`, by scenario and arm."""

    run: StoredRun

    @cached_property
    def scenarios(self) -> tuple[StoredScenario, ...]:
        """Finished scenarios in the order of the run."""
        rows: dict[str, list[Row]] = defaultdict(list)
        for row in self.run.tables.get("summary.csv", ()):
            rows[row.text("scenario")].append(row)
        return tuple(StoredScenario(name, tuple(arms)) for name, arms in rows.items())

    @property
    def passed(self) -> tuple[StoredScenario, ...]:
        """Scenarios whose times may be shown."""
        return tuple(scenario for scenario in self.scenarios if scenario.passed)

    @cached_property
    def asked(self) -> tuple[str, ...]:
        """Labels of base and candidate, one where both are the same; () before the first scenario
        has ended."""
        rows = [s.row(role) for s in self.scenarios[:1] for role in ("base", "candidate")]
        return tuple(dict.fromkeys(row.text("arm") for row in rows if row is not None))

    @property
    def candidate(self) -> str:
        """Label of the arm that is judged."""
        return self.asked[-1] if self.asked else ""

    @property
    def base(self) -> str:
        """Label of the arm that it is compared with."""
        return self.asked[0] if self.asked else ""

    def rows(self, table: str, scenario: str | None = None, arm: str | None = None) -> list[Row]:
        """Rows of a table, of finished scenarios only."""
        return [
            row
            for name, rows in self._by_scenario(table).items()
            if scenario is None or name == scenario
            for row in rows
            if arm is None or row.text("arm") == arm
        ]

    def _by_scenario(self, table: str) -> dict[str, list[Row]]:
        if table not in self._index:
            known = {scenario.name for scenario in self.scenarios}
            found: dict[str, list[Row]] = defaultdict(list)
            for row in self.run.tables.get(table, ()):
                if row.text("scenario") in known:
                    found[row.text("scenario")].append(row)
            self._index[table] = found
        return self._index[table]

    @cached_property
    def _index(self) -> dict[str, dict[str, list[Row]]]:
        return {}

    def has(self, table: str) -> bool:
        """Whether the run has this file: an older one may lack it."""
        return table in self.run.tables

    def samples(self, scenario: str, arm: str, measure: str) -> list[float]:
        """Seconds of one measure of a scenario that passed, in the order of the file."""
        return [value for _, value in self._samples(scenario, arm, measure)]

    def by_step(self, scenario: str, arm: str, measure: str) -> dict[int, float]:
        """Median seconds of each step over its samples, of a scenario that passed."""
        values: dict[int, list[float]] = defaultdict(list)
        for row, value in self._samples(scenario, arm, measure):
            step = row.whole("step")
            if step is not None:
                values[step].append(value)
        return {step: float(np.median(found)) for step, found in sorted(values.items())}

    def _samples(self, scenario: str, arm: str, measure: str) -> Iterable[tuple[Row, float]]:
        if not any(s.name == scenario for s in self.passed):
            return
        for row in self.rows("samples.csv", scenario, arm):
            if row.text("measure") == measure:
                value = row.number("value_ms")
                if value is not None:
                    yield row, value / 1e3

    def num_ranks_of(self, arm: str) -> int:
        """Ranks of an arm: the reference has one, whatever the settings say."""
        return 1 if base_arm(arm) == "reference" else self.num_ranks

    @property
    def num_ranks(self) -> int:
        """Ranks that share the device, in every arm but the reference."""
        sizes = ("prefill_context_parallel_size", "tensor_parallel_size")
        settings = self.run.section("settings")
        known = [settings.get(size) for size in sizes]
        return int(np.prod([size for size in known if isinstance(size, int) and size > 0] or [1]))
