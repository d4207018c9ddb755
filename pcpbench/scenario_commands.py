"""The `pcpbench scenarios` commands: what the catalogue knows, on stdout. Owns no logic."""

from __future__ import annotations

import json

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pcpbench.catalogue import (
    ScenarioDetail,
    ScenarioInfo,
    describe_scenario,
    list_scenarios,
    schema,
    validate_scenarios,
)
from pcpbench.report.console import make_console, new_table
from pcpbench.report.printable import printable
from pcpbench.report.units import count


def show_list() -> None:
    """Print all shipped scenarios."""
    console = make_console()
    for info in list_scenarios():
        counts = f"{count(info.num_steps, 'step')}, {count(info.num_requests, 'request')}"
        covers = f", covers {' '.join(info.covers)}" if info.covers else ""
        console.print(Text(info.name, style="bold"), Text(counts + covers), sep="  ")
        console.print(Padding(first_sentence(info.description), (0, 0, 0, 4)))


def show_one(name_or_file: str) -> None:
    """Print one scenario with the steps it turns into."""
    detail = describe_scenario(name_or_file)
    console = make_console()
    info = detail.info
    console.print(Text(info.name, style="bold"))
    console.print(info.description.strip())
    console.print(_facts(info))
    console.print(_step_table(detail))


def validate(names_or_files: list[str]) -> None:
    """Check scenarios; the first bad one raises its error."""
    for info in validate_scenarios(names_or_files):
        requests, steps = count(info.num_requests, "request"), count(info.num_steps, "step")
        print(f"{printable(str(info.path))}: valid, {requests}, {steps}")


def show_schema() -> None:
    """Print the JSON Schema of a scenario file."""
    print(json.dumps(schema(), indent=2))


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence."""
    flat = " ".join(text.split())
    return flat.split(". ")[0].rstrip(".") + "."


def _facts(info: ScenarioInfo) -> str:
    kinds = (
        f"{info.num_prefill_steps} with a prefill, {info.num_decode_steps} decode only, "
        f"{info.num_idle_steps} idle"
    )
    lines = [
        f"file      {info.path}",
        f"covers    {' '.join(info.covers) or '(nothing named)'}",
        f"requests  {info.num_requests}, {info.num_output_tokens} output tokens",
        f"steps     {info.num_steps}: {kinds}; at most {info.max_decode_batch} decodes in one, "
        f"{info.num_preemptions} preemptions",
    ]
    if info.source:
        lines.insert(1, f"source    {' '.join(info.source.split())}")
    return "\n".join(lines)


def _step_table(detail: ScenarioDetail) -> Table:
    counts = ["Decodes", "Prefills", "Tokens", "Finished", "Preempted"]
    table = new_table(["Step", "Kind"], counts)
    for step in detail.steps:
        table.add_row(
            str(step.index),
            step.kind,
            str(step.num_decodes),
            str(step.num_prefills),
            str(step.num_tokens),
            str(step.num_finished),
            str(step.num_preempted),
        )
    return table
