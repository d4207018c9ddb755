"""Every number of a page, from runs whose files were written by hand: what is shown of them."""

import csv
import json
import os

import numpy as np
import pytest

from pcpbench import cli
from pcpbench.report.page import plots
from pcpbench.report.page.drift import NO_SHARE
from pcpbench.report.page.faults import read_faults
from pcpbench.report.page.page import render_page
from pcpbench.report.page.speed import speed_sections
from pcpbench.report.page.trend import trend_section
from pcpbench.report.page.work import work_sections
from pcpbench.report.stored import read_run
from pcpbench.report.stored_compare import StoredCompare

KEYS = {
    "summary.csv": ["scenario", "arm", "role", "outcome"],
    "steps.csv": ["scenario", "arm", "step", "served_as"],
    "samples.csv": ["scenario", "arm", "measure", "value_ms"],
    "drift.csv": ["scenario", "step", "kind", "arm", "tensor", "outcome"],
}


@pytest.fixture
def store(tmp_path):
    """Writes a run's directory: rows of each table as dicts."""

    def write(name="run", started="2026-01-01T00:00:00+00:00", command="compare", settings=None,
              outcome="pass", **tables):  # fmt: skip
        path = tmp_path / name
        path.mkdir()
        for stem, keys in KEYS.items():
            rows = tables.get(stem.removesuffix(".csv"), ())
            names = list(dict.fromkeys([*keys, *(key for row in rows for key in row)]))
            with (path / stem).open("w", newline="") as stream:
                writer = csv.DictWriter(stream, names, restval="", lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        manifest = {
            "schema_version": 1, "pcpbench_version": "0", "command": command, "outcome": outcome,
            "started_at": started, "settings": settings or {},
        }  # fmt: skip
        (path / "manifest.json").write_text(json.dumps(manifest))
        return path

    return write


def compare_of(path):
    return StoredCompare(read_run(path))


def arms(base="eager", candidate="full", **cells):
    """Rows of summary.csv of a scenario that passed."""
    known = {"scenario": "s", "outcome": "pass"}
    return [
        {**known, "arm": base, "role": "base", **cells.pop("base_cells", {})},
        {**known, "arm": candidate, "role": "candidate", **cells},
    ]


def samples(arm, measure, values, steps=None):
    steps = range(len(values)) if steps is None else steps
    return [
        {"scenario": "s", "arm": arm, "measure": measure, "value_ms": value, "step": step}
        for step, value in zip(steps, values, strict=True)
    ]


def section(sections, title):
    return next(one for one in sections if one.title == title)


# ------------------------------------------------------------------------------------------- times


def test_times_are_the_statistics_of_each_arms_own_samples(store, figures):
    values = {"eager": [2.0, 4.0, 9.0], "full": [1.0, 2.0, 3.0]}
    rows = [row for arm, found in values.items() for row in samples(arm, "tpot", found)]
    summary = arms(tpot_ratio=0.5, tpot_ratio_low=0.4, tpot_ratio_high=0.6)
    run = compare_of(store(summary=summary, samples=rows))
    (figure,) = section(speed_sections(run), "TPOT by arm").figures
    assert figure.table.columns == [
        *("scenario", "arm", "samples", "median ms", "mean ms", "std ms", "p99 ms", "ratio [95 %]")
    ]
    for row, (arm, found) in zip(figure.table.rows, values.items(), strict=True):
        numbers = np.median(found), np.mean(found), np.std(found), np.percentile(found, 99)
        assert row[:3] == ["s", arm, "3"]
        assert [float(cell) for cell in row[3:7]] == pytest.approx(numbers, abs=1e-3)
    assert [row[7] for row in figure.table.rows] == ["-", "0.500 [0.400, 0.600]"]


def test_whiskers_end_where_the_page_says(figures):
    values = [*range(35), -90.0, 100.0]
    plots.box_plot([plots.BoxGroup("s", {"full": values})], "ms", "t", "d")
    (axes,) = figures[0].axes
    drawn = {round(float(x), 6) for line in axes.lines for x in line.get_xdata()}
    ends = np.percentile(values, (1, 25, 50, 75, 99))
    assert {round(float(end), 6) for end in ends} <= drawn


@pytest.mark.parametrize(
    ("base_capture", "ours", "told"),
    [
        ("", 3.0, ["s", "100.0", "2000.0", "50", "0.15"]),
        (40.0, 3.0, ["s", "60.0", "2000.0", "30", "0.09"]),
        (200.0, 3.0, ["s", "0.0", "2000.0", "0.0", "0.00"]),
        ("", 6.0, ["s", "100.0", "-1000.0", "never", "-"]),
    ],
)
def test_break_even_is_the_capture_over_the_saving_of_a_step(
    store, figures, base_capture, ours, told
):
    rows = samples("eager", "step", [5.0, 5.0, 4.0, 6.0], [0, 1, 0, 1])
    rows += samples("full", "step", [ours] * 4, [0, 1, 0, 1])
    summary = arms(capture_ms=100.0, base_cells={"capture_ms": base_capture})
    (figure,) = section(speed_sections(compare_of(store(summary=summary, samples=rows))),
                        "Break-even").figures  # fmt: skip
    assert figure.table.rows == [told]


def test_a_candidate_without_graphs_has_nothing_to_earn_back(store):
    rows = samples("full", "step", [3.0]) + samples("eager", "step", [5.0])
    summary = arms("full", "eager", base_cells={"capture_ms": 9.0})
    (figure,) = section(speed_sections(compare_of(store(summary=summary, samples=rows))),
                        "Break-even").figures  # fmt: skip
    assert figure.note.startswith("The candidate captured no graphs")


def test_graphs_of_as_many_tokens_are_told_apart(store, figures):
    shapes = [(8, 2), (8, 4), (8, 8), (1, 1)]
    steps = [
        {"scenario": "s", "arm": "full", "step": step, "served_as": "FULL",
         "descriptor_num_tokens": tokens, "descriptor_num_reqs": reqs}
        for step, (tokens, reqs) in enumerate(shapes)
    ]  # fmt: skip
    rows = samples("full", "itl", [1.0, 2.0, 3.0, 4.0]) + samples("eager", "itl", [5.0])
    run = compare_of(store(summary=arms(), steps=steps, samples=rows))
    (figure,) = section(speed_sections(run), "ITL over steps").figures
    assert [row[1] for row in figure.table.rows] == [
        "FULL, 8 tokens of 2 requests",
        "FULL, 8 tokens of 4 requests",
        "FULL, 8 tokens",
        "FULL, 1 token",
    ]
    assert figure.table.rows[0][2:] == ["5.000", "1.000"]


def test_twenty_series_and_the_rest_differ_in_more_than_colour():
    looks = [plots.mark(number) for number in (*range(20), plots.OTHERS)]
    seen = {(look["marker"], look.get("markerfacecolor") == "none") for look in looks}
    assert len(seen) == 21


# ------------------------------------------------------------------------------------ what was run


def step(arm, number, served_as, **cells):
    return {"scenario": "s", "arm": arm, "step": number, "served_as": served_as, **cells}


def test_padding_is_a_share_of_what_was_executed(store, figures):
    size = {"num_reqs": 2, "has_prefill": "false"}
    steps = [
        step("full", 0, "FULL", real_tokens=2, padded_tokens=4, **size),
        step("full", 1, "FULL", real_tokens=4, padded_tokens=4, **size),
        step("full", 2, "IDLE", real_tokens=0, padded_tokens=4, idle="true", **size),
        step("eager", 0, "NONE", real_tokens=1, padded_tokens=8, **size),
    ]
    run = compare_of(store(summary=arms(), steps=steps))
    (figure,) = section(work_sections(run), "Padding waste by batch size").figures
    assert figure.table.rows == [["2", "decode only", "2", "6", "8", "25.0 %"]]


def test_a_step_is_served_by_full_only_where_it_was(store, figures):
    padded = "eager_padded[full]"
    steps = [
        step("full", 0, "NONE", miss_reason="batch has a prefill"),
        step("full", 1, "FULL"),
        step("full", 2, "FULL"),
        step("full", 3, "NONE"),
        step("full", 4, "IDLE"),
        step(padded, 0, "NONE", miss_reason="batch has a prefill"),
        step(padded, 1, "NONE"),
    ]
    run = compare_of(store(summary=arms(padded), steps=steps))
    (figure,) = section(work_sections(run), "Dispatch misses").figures
    assert figure.title == "Steps of full"
    counts = dict(zip(figure.table.columns, figure.table.rows[0], strict=True))
    assert counts == {
        "scenario": "s",
        "served by FULL": "2",
        "missed: batch has a prefill": "1",
        "missed: no reason was given": "1",
    }


# ------------------------------------------------------------------------------------------- drift


def drift(tensor, outcome="bitwise", relative=0.0, layer="", number=0, kind="padding", **cells):
    return {
        "scenario": "s", "step": number, "kind": kind, "arm": "full", "twin": "eager",
        "tensor": tensor, "layer": layer, "outcome": outcome, "relative": relative, **cells,
    }  # fmt: skip


def drift_figure(store, rows):
    run = compare_of(store(summary=arms(), drift=rows))
    (figure,) = section(work_sections(run), "Drift by step and layer").figures
    return figure


def test_each_cache_and_each_output_of_a_draft_model_has_a_row_of_its_own(store, figures):
    bad = {"outcome": "within_budget", "relative": 2e-6, "num_mismatched": 3}
    rows = [
        drift("draft_logits", **bad),
        drift("proposed"),
        drift("kv_cache", layer=0),
        drift("draft_kv_cache", layer=0, **bad),
        drift("index_cache", "exceeds_budget", 0.5, 0, num_mismatched=7),
        drift("kv_cache", layer=1),
        drift("hidden"),
        drift("something_new", **bad),
    ]
    figure = drift_figure(store, rows)
    assert [(row[3], row[4], row[6], row[7]) for row in figure.table.rows] == [
        ("layer 0", "0", "0", "bitwise"),
        ("layer 1", "0", "0", "bitwise"),
        ("index layer 0", "0.5", "7", "exceeds budget"),
        ("hidden", "0", "0", "bitwise"),
        ("draft layer 0", "2.0e-06", "3", "within budget"),
        ("draft_logits", "2.0e-06", "3", "within budget"),
        ("proposed", "0", "0", "bitwise"),
        ("something_new", "2.0e-06", "3", "within budget"),
    ]


def test_a_token_that_differs_is_not_drawn_as_equal(store, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "cell_maps", lambda maps, classes, *_: drawn.append((maps, classes)))
    rows = [
        drift("sampled", number=0),
        drift("sampled", "within_budget", "", number=1, num_mismatched=1),
        drift("logits", "within_budget", 3e-6, number=1, num_mismatched=9),
        drift("hidden", "exceeds_budget", "inf", number=1, num_mismatched=2),
    ]
    figure = drift_figure(store, rows)
    ((one,), classes) = drawn[0]
    assert classes == [NO_SHARE, "1e-6 to 1e-5"]
    names = {name: row for row, name in enumerate(one.rows)}
    assert dict(one.cells) == {(1, names["sampled"]): 0, (1, names["logits"]): 1}
    assert one.bad == {(1, names["hidden"])}
    sampled = next(row for row in figure.table.rows if row[3] == "sampled")
    assert sampled[4:] == ["-", "1", "1", "within budget"]
    assert next(row for row in figure.table.rows if row[3] == "hidden")[4] == "inf"


def test_the_worst_is_by_outcome_before_it_is_by_size(store, figures):
    rows = [
        drift("hidden", "within_budget", 0.9, number=0, num_mismatched=1),
        drift("hidden", "non_finite", "", number=1, num_mismatched=1),
        drift("hidden", "within_budget", 0.1, number=2, num_mismatched=1),
    ]
    (row,) = drift_figure(store, rows).table.rows
    assert row[5:] == ["1", "3", "non finite"]


def test_long_scenarios_have_the_worst_of_several_steps_in_a_column(store, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "cell_maps", lambda maps, *_: drawn.extend(maps))
    rows = [drift("hidden", number=n) for n in range(250)]
    rows[4] = drift("hidden", "within_budget", 2e-6, number=4, num_mismatched=1)
    rows[5] = drift("hidden", "within_budget", 2e-4, number=5, num_mismatched=1)
    drift_figure(store, rows)
    assert drawn[0].num_columns == 84
    assert dict(drawn[0].cells) == {(1, 0): 2}


# ------------------------------------------------------------------------------------------- trend


def test_the_trend_is_in_order_of_time_and_shows_what_is_not_allowed(store, figures):
    def run(day, ratio, **cells):
        known = {"drift_kind": "capture", "drift_relative": 0.0, "drift_ok": "true",
                 "drift_outcome": "bitwise", "tpot_ratio": ratio}  # fmt: skip
        return compare_of(store(str(day), f"2026-01-0{day}T00:00:00+00:00",
                                summary=arms(**(known | cells))))  # fmt: skip

    runs = [
        run(1, 0.9),
        run(2, 0.5, drift_outcome="non_finite", drift_ok="false"),
        run(3, 0.7, drift_outcome="exceeds_budget", drift_ok="false", drift_relative="inf"),
    ]
    tables = {figure.title: figure.table for figure in trend_section(runs).figures}
    ratio, capture = tables["TPOT ratio"], tables["Capture drift"]
    assert [row[3] for row in ratio.rows] == ["0.9", "0.5", "0.7"]
    assert "not allowed" not in ratio.columns
    assert [(row[3], row[-1]) for row in capture.rows] == [("0", "0"), ("inf", "1"), ("inf", "1")]
    assert capture.columns[-1] == "not allowed"
    crosses = [line for line in figures[1].axes[0].lines if line.get_label() == "not allowed"]
    assert [list(line.get_xdata()) for line in crosses] == [[2, 3]]


def test_runs_are_shown_oldest_first(store):
    paths = [store("late", "2026-02-01T00:00:00+00:00"), store("early")]
    text = render_page([read_run(path) for path in paths])
    assert text.index(">early<") < text.index(">late<")


def test_a_ratio_below_zero_is_in_the_plot(figures):
    plots.trend_lines([plots.Trend("k", [1, 2], [-0.5, 1.0], [(-0.7, 0.1), (1.0, 1.0)], 0)], 2,
                      "a", "t", "d")  # fmt: skip
    low, high = figures[0].axes[0].get_ylim()
    assert low < -0.7 < 1.0 < high


# ------------------------------------------------------------------------------- what else is told


def test_a_planted_fault_is_told_before_any_number(store):
    text = render_page([read_run(store(settings={"inject": "stale-rows"}, outcome="fail"))])
    assert "The fault stale-rows was planted on purpose." in text


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("compare --target engine", "All of summary.csv"),
        ("check-partition", "partition.csv has no row"),
        ("something-new", "has no table that a report shows"),
        ("gate-self-check", "There is no self-check.json"),
    ],
)
def test_other_commands_show_a_table_or_say_that_they_have_none(store, command, told):
    run = read_run(store(command=command, summary=arms()))
    assert told in render_page([run])


def test_the_fault_table_tells_false_alarms_and_what_has_no_verdict(tmp_path):
    fault = {"name": "f", "class_id": "K01", "description": "d", "contracts": ["C1"]}
    runs = [
        {"fault": fault, "world": "pcp 2", "scenario": "s1", "fired": ["C1"], "verdict": "caught"},
        {"fault": fault, "world": "", "scenario": "", "fired": [], "verdict": "not triggered"},
    ]
    clean = [{"world": "pcp 2", "scenario": "s2", "accused": True, "detail": "C5 broke"},
             {"world": "pcp 4", "scenario": "s3", "accused": False, "detail": ""}]  # fmt: skip
    document = {"schema_version": 1, "command": "faults run", "num_faults": 1, "num_caught": 1,
                "num_false_alarms": 1, "runs": runs, "clean": clean}  # fmt: skip
    file = tmp_path / "f.json"

    def page():
        file.write_text(json.dumps(document))
        return render_page([], [read_faults(file)])

    text = page()
    assert "1 of 1 faults caught, 1 false alarms, 1 without a verdict" in text
    assert "C5 broke" in text
    assert "false alarm</td>" in text
    assert "s3" not in text
    document["runs"] = runs[1:]
    assert "no fault was judged" in page()


def test_a_line_that_a_killed_run_had_begun_is_left_out(store):
    rows = samples("full", "tpot", [1.0, 2.0])
    path = store(summary=arms(), samples=rows, outcome="running")
    text = (path / "samples.csv").read_text()
    (path / "samples.csv").write_text(text[:-4])
    assert compare_of(path).samples("s", "full", "tpot") == [1e-3]


def test_paths_that_cannot_be_looked_at_are_refused(store, tmp_path, capsys):
    run = str(store())
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "loop", tmp_path / ("x" * 300)):
        assert cli.run(["report", str(path)]) == 2
        assert cli.run(["report", run, "--out", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 2
    os.mkfifo(tmp_path / "pipe")
    assert cli.run(["report", run, "--out", str(tmp_path / "pipe")]) == 2
    assert "no regular file" in capsys.readouterr().err


def test_a_directory_whose_name_is_no_text_is_shown_by_its_escapes(store, tmp_path, monkeypatch):
    odd = tmp_path / "r\udcff"
    store().rename(odd)
    monkeypatch.chdir(odd)
    assert cli.run(["report", "."]) == 0
    assert "r\\udcff" in (odd / "report.html").read_text()
