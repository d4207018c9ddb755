"""docs/scenarios.md against the code: its example loads, its table has the numbers of today."""

from __future__ import annotations

import re
from pathlib import Path

from pcpbench.catalogue import list_scenarios
from pcpbench.scenarios.loader import parse_scenario
from pcpbench.scenarios.schema import Limits, Scenario

TEXT = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text()


def test_the_example_loads_and_shows_every_key_with_its_default() -> None:
    block = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    scenario = parse_scenario(block.group(1), "docs")
    assert scenario.limits == Limits()
    assert [spec.arrival_step for spec in scenario.expand()] == [0, 0, 0, 0, 6, 125, 0, 20]
    for struct in (Scenario, Limits, type(scenario.requests[0])):
        for key in struct.__struct_fields__:
            assert f"{key}:" in block.group(1), key


def test_the_table_has_every_scenario_as_it_is() -> None:
    rows = {}
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            rows[cells[0].strip("`")] = cells[2:]
    expected = {
        info.name: [
            ", ".join(info.covers),
            str(info.num_requests),
            f"{info.num_steps} ({info.num_decode_steps})",
        ]
        for info in list_scenarios()
    }
    assert rows == expected
