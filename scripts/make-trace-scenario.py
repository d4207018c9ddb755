#!/usr/bin/env python3
"""Cut a scenario file from a request trace: lengths and arrivals, scaled to fit a small model.

    .venv/bin/python scripts/make-trace-scenario.py TRACE.csv --name azure-code --count 20 \
        --context-divisor 60 --source "AzurePublicDataset, CC BY 4.0" > mine.yaml

Columns are found by name, never by position: time (TIMESTAMP or Timestamp; dates or seconds),
prompt tokens (ContextTokens, Request tokens) and output tokens (GeneratedTokens, Response tokens).
Rows without output tokens are failed requests and are left out.
"""

from __future__ import annotations

import argparse
import csv
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

try:
    from pcpbench.errors import PcpbenchError, UsageError
    from pcpbench.report.streams import guard_streams
    from pcpbench.scenarios.loader import parse_scenario
    from pcpbench.scenarios.schema import Limits
except ImportError as error:
    print(
        f"make-trace-scenario: {sys.executable} has no {error.name}: run scripts/setup, then "
        ".venv/bin/python scripts/make-trace-scenario.py.",
        file=sys.stderr,
    )
    sys.exit(2)

TIME_COLUMNS = ("TIMESTAMP", "Timestamp")
CONTEXT_COLUMNS = ("ContextTokens", "Request tokens")
OUTPUT_COLUMNS = ("GeneratedTokens", "Response tokens")


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace: arrival in seconds, prompt and output tokens."""

    time_s: float
    context: int
    output: int


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Rows of a trace in the order of the file, failed requests left out; UsageError for no CSV."""
    try:
        yield from _read_rows(path)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is no text in UTF-8 (byte {error.start}): name a CSV file with a header."
        ) from error
    except csv.Error as error:
        raise UsageError(f"{path} is no CSV file ({error}): name one with a header.") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): name a CSV file.") from error


def _read_rows(path: Path) -> Iterator[TraceRow]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or []
        columns = [_find(names, wanted) for wanted in (TIME_COLUMNS, CONTEXT_COLUMNS)]
        columns.append(_find(names, OUTPUT_COLUMNS))
        for row in reader:
            time, context, output = (row[column] for column in columns)
            try:
                parsed = TraceRow(_seconds(time), int(context), int(output))
            except (TypeError, ValueError, OverflowError) as error:
                raise UsageError(
                    f"{path}, line {reader.line_num}: {time!r}, {context!r}, {output!r} are not a "
                    "time and two token counts: cut the line or mend it."
                ) from error
            if parsed.output > 0:
                yield parsed


def _find(names: list[str] | tuple[str, ...], wanted: tuple[str, ...]) -> str:
    for name in wanted:
        if name in names:
            return name
    raise UsageError(
        f"the trace has the columns {', '.join(names) or '(none)'}: it needs one of "
        f"{', '.join(wanted)}."
    )


def _seconds(text: str) -> float:
    """Seconds of `3.5` or of `2023-11-16 18:17:03.9799600` (7 digits: fractions are read apart)."""
    if ":" not in text:
        return float(text)
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")


def render(rows: list[TraceRow], options: argparse.Namespace) -> str:
    """The scenario file for `rows`: arrivals from the first one on, lengths divided, rounded up."""
    scaling = (
        f"{len(rows)} consecutive requests from row {options.start + 1} on; prompt tokens divided "
        f"by {options.context_divisor} and output tokens by {options.output_divisor}, rounded up, "
        f"outputs cut at {options.max_output}; arrivals as recorded, one step for every "
        f"{options.step_time_s:g} s, longer gaps cut to {options.max_idle_steps} dummy steps."
    )
    lines = [
        "# Made by scripts/make-trace-scenario.py.",
        f"name: {options.name}",
        _folded("description", options.description),
        _folded("source", f"{options.source}. {scaling}"),
        f"covers: [{options.covers}]",
        f"step_time_s: {options.step_time_s:g}",
        f"max_idle_steps: {options.max_idle_steps}",
        "limits:",
        f"  max_model_len: {options.max_model_len}",
        "requests:",
    ]
    for row in rows:
        prompt_len = -(-row.context // options.context_divisor)
        output_len = min(-(-row.output // options.output_divisor), options.max_output)
        at_s = round(row.time_s - rows[0].time_s, 6)
        lines.append(f"  - {{prompt_len: {prompt_len}, output_len: {output_len}, at_s: {at_s}}}")
    return "\n".join(lines) + "\n"


def _folded(key: str, text: str) -> str:
    """A YAML folded scalar, wrapped; line breaks within `text` become spaces."""
    body = textwrap.fill(" ".join(text.split()), 100, initial_indent="  ", subsequent_indent="  ")
    return f"{key}: >-\n{body}"


def main(arguments: list[str]) -> int:
    """Print the scenario; for a trace that cannot be used one sentence on stderr and 2."""
    options = _parser().parse_args(arguments)
    try:
        if not options.trace.is_file():
            raise UsageError(f"{options.trace} is no file: name a CSV file with a header.")
        rows = list(read_trace(options.trace))[options.start :][: options.count]
        if not rows:
            raise UsageError(f"--start is {options.start}, past the last row of {options.trace}.")
        rows.sort(key=lambda row: row.time_s)
        text = render(rows, options)
        parse_scenario(text, options.name)
        sys.stdout.write(text)
        sys.stdout.flush()
    except PcpbenchError as error:
        print(f"make-trace-scenario: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=_path, help="CSV file with a header")
    parser.add_argument("--name", type=_text, required=True, help="name of the scenario")
    parser.add_argument(
        "--source", type=_text, required=True, help="where the trace is from, with its licence"
    )
    parser.add_argument("--description", default="Lengths and arrivals of a recorded trace.")
    parser.add_argument("--covers", default="", help="ids, such as S12,K26")
    for flag, default, text in (
        ("start", 0, "rows to leave out first"),
        ("count", 20, "requests to keep"),
        ("context-divisor", 60, "prompt tokens are divided by this"),
        ("output-divisor", 1, "output tokens are divided by this"),
        ("max-output", 48, "longest output"),
        ("max-model-len", Limits().max_model_len, "longest request"),
        ("max-idle-steps", 2, "dummy steps in one gap"),
    ):
        low = 0 if flag in ("start", "max-idle-steps") else 1
        parser.add_argument(f"--{flag}", type=_at_least(low), default=default, help=text)
    parser.add_argument("--step-time-s", type=float, default=0.05, help="seconds of one step")
    return parser


def _text(value: str) -> str:
    if not value.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return value


def _path(value: str) -> Path:
    return Path(_text(value))  # "" would be the working directory


def _at_least(low: int):  # noqa: ANN202 - a parser type for argparse
    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value

    return number


if __name__ == "__main__":
    guard_streams()
    sys.exit(main(sys.argv[1:]))
