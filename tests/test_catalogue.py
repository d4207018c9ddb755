"""What the command line can say about scenarios, as data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pcpbench import catalogue
from pcpbench.errors import ScenarioError, UsageError
from pcpbench.scenarios.loader import shipped_names
from pcpbench.scenarios.schema import Limits, RequestEntry, Scenario


def test_the_list_counts_every_step_once() -> None:
    infos = catalogue.list_scenarios()
    assert [info.name for info in infos] == shipped_names()
    for info in infos:
        parts = (info.num_prefill_steps, info.num_decode_steps, info.num_idle_steps)
        assert sum(parts) == info.num_steps
        assert min(info.num_requests, info.num_decode_steps, info.num_idle_steps) > 0
        assert Path(info.path).name == f"{info.name}.yaml"


def test_a_description_shows_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "name: own\ndescription: d\nrequests:\n"
        "  - {prompt_len: 5, output_len: 3}\n"
        "  - {prompt_len: 7, output_len: 1, at_step: 1}\n"
    )
    detail = catalogue.describe_scenario(path)
    assert [step.kind for step in detail.steps] == ["prefill", "mixed", "decode", "idle"]
    assert [step.num_tokens for step in detail.steps] == [5, 8, 1, 0]
    assert [step.num_finished for step in detail.steps] == [0, 0, 1, 1]
    assert detail.info.num_output_tokens == 4
    assert detail.info.path == str(path)
    assert catalogue.validate_scenarios([str(path)]) == [detail.info]


def test_validation_ends_at_the_first_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="does not exist"):
        catalogue.validate_scenarios(["steady-mixed", str(tmp_path / "absent.yaml")])
    endless = tmp_path / "endless.yaml"
    endless.write_text(
        "name: endless\ndescription: d\nlimits: {max_num_seqs: 1}\n"
        "requests: [{prompt_len: 1, output_len: 255, count: 1000}]\n"
    )
    with pytest.raises(UsageError, match="more than 50,000 steps"):
        catalogue.validate_scenarios([str(endless)])


def test_the_schema_documents_every_field() -> None:
    schema = json.loads(json.dumps(catalogue.schema()))
    for struct in (Scenario, Limits, RequestEntry):
        definition = schema["$defs"][struct.__name__]
        assert definition["additionalProperties"] is False
        for name, field in definition["properties"].items():
            variants = [field, *field.get("anyOf", [])]
            assert name == "limits" or any("description" in one for one in variants), name
