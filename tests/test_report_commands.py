"""`pcpbench report` and `pcpbench trace` on a real run: what they make, refuse and leave alone."""

import json
import re
import shutil
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pcpbench import cli
from pcpbench.report.stored import read_run
from pcpbench.report.stored_compare import StoredCompare

SCENARIO = """\
name: {name}
description: Two requests that decode together.
requests:
  - {{prompt_len: 9, output_len: 5}}
  - {{prompt_len: 5, output_len: 4}}
"""


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    """One run of two tiny scenarios that passed; tests that change it copy it first."""
    home = tmp_path_factory.mktemp("runs")
    arguments = ["compare", "eager", "full_and_piecewise", "--repetitions", "2"]
    for name in ("first", "second"):
        (home / f"{name}.yaml").write_text(SCENARIO.format(name=name))
        arguments += ["--scenario", str(home / f"{name}.yaml")]
    assert cli.run([*arguments, "--out", str(home / "run")]) == 0
    return home / "run"


@pytest.fixture
def run_dir(stored, tmp_path):
    return Path(shutil.copytree(stored, tmp_path / "run"))


@pytest.fixture(scope="session")
def page_text(stored, tmp_path_factory):
    """The page over that run, as it is."""
    out = tmp_path_factory.mktemp("page") / "page.html"
    assert cli.run(["report", str(stored), "--out", str(out)]) == 0
    return out.read_text()


class Page(HTMLParser):
    """Tags with their attributes, and whether each figure has a plot and a table."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.figures, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if "id" in attrs:
            self.ids.append(attrs["id"])
        if tag == "figure":
            self.figures.append(set())
        elif self.figures:
            self.figures[-1].add(tag)


def page_of(run, *more):
    out = run.parent / "page.html"
    assert cli.run(["report", str(run), *map(str, more), "--out", str(out)]) == 0
    return out.read_text()


def rewrite(file, change):
    file.write_text(change(file.read_text()))


def test_the_page_has_all_plots_and_a_table_under_each(run_dir, capsys):
    assert cli.run(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out.strip() == str(run_dir / "report.html")
    text = (run_dir / "report.html").read_text()
    for title in (
        "TPOT by arm",
        "ITL over steps",
        "Launch overhead",
        "Break-even",
        "Padding waste by batch size",
        "Dispatch misses",
        "Drift by step and layer",
    ):
        assert f"<h3>{title}</h3>" in text
    page = Page(text)
    assert len(page.figures) >= 9
    assert all({"svg", "details", "table"} <= tags for tags in page.figures if "svg" in tags)
    assert sum("svg" in tags for tags in page.figures) >= 8
    assert "2 ranks share one device and run one after the other" in text


def test_the_page_needs_nothing_else(page_text):
    text = page_text
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    links = [v for _, attrs in page.tags for k, v in attrs.items() if "href" in k or k == "src"]
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text
    targets = [link[1:] for link in links] + re.findall(r"url\(#([^)]*)\)", text)
    assert len(page.ids) == len(set(page.ids))
    assert set(targets) <= set(page.ids)


def test_plots_follow_the_colours_of_the_page_and_tell_what_they_show(page_text):
    text = page_text
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    for drawing in drawings:
        assert 'role="img"' in drawing
        assert re.search(r"<title id=\"[^\"]+\">[^<]+</title><desc id=\"[^\"]+\">[^<]+", drawing)
        assert not re.findall(r"#[0-9a-f]{6}", drawing), "a colour that no theme changes"
    declared = set(re.findall(r"(--[a-z0-9-]+):", text))
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", text)) <= declared


def test_what_a_file_says_is_never_markup(run_dir):
    evil = '<script>alert("x")</script>$\\frac{1}{2}$\x1b[1m\u202e\u65e5'
    for file in run_dir.glob("*.csv"):
        rewrite(file, lambda s: s.replace("first", '"' + evil.replace('"', '""') + '"'))
    manifest = json.loads((run_dir / "manifest.json").read_text())
    manifest |= {"arguments": [evil], "reasons": [evil], "settings": {evil: evil}}
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    text = page_of(run_dir)
    assert "<script" not in text
    assert "alert(" in text
    assert not set(text) & set("\x1b\u202e")
    assert len(Page(text).figures) >= 9


def test_no_time_is_shown_for_what_did_not_pass(run_dir, page_text):
    def fail(text):
        lines = text.split("\n")
        return "\n".join(
            line.replace(",pass,", ",fail,", 1) if line.startswith("first,") else line
            for line in lines
        )

    before = page_text
    rewrite(run_dir / "summary.csv", fail)
    text = page_of(run_dir)
    assert "No times are shown for what did not pass: first (fail)." in text
    itl = text[text.index("ITL over steps") : text.index("<h3>Launch overhead")]
    assert "second" in itl
    assert "first" not in itl
    assert "first" in before[before.index("ITL over steps") : before.index("<h3>Launch overhead")]
    assert "first" in text[text.index("Drift by step") :]


def test_nobody_is_handed_times_of_what_did_not_pass(run_dir):
    assert StoredCompare(read_run(run_dir)).samples("first", "eager", "tpot")
    rewrite(run_dir / "summary.csv", lambda s: s.replace(",pass,", ",not compared,"))
    run = StoredCompare(read_run(run_dir))
    assert run.samples("first", "eager", "tpot") == []
    assert run.by_step("first", "eager", "step") == {}


def test_a_killed_run_shows_what_had_finished(run_dir):
    manifest = json.loads((run_dir / "manifest.json").read_text())
    manifest |= {"outcome": "running", "files": ["manifest.json"]}
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    (run_dir / "summary.json").unlink()
    keep = lambda text: "".join(  # noqa: E731
        line for line in text.splitlines(True) if not line.startswith("second,")
    )
    rewrite(run_dir / "summary.csv", keep)  # its last table: the scenario had not finished
    text = page_of(run_dir)
    assert "The run did not end by itself" in text
    assert "<figcaption>first</figcaption>" in text
    assert ">first</td>" in text
    assert ">second<" not in text


def test_a_run_killed_before_its_first_scenario(run_dir):
    for file in run_dir.glob("*.csv"):
        rewrite(file, lambda text: text.splitlines(True)[0])
    assert "No scenario had finished." in page_of(run_dir)


def test_a_run_of_an_older_version_says_what_it_lacks(run_dir):
    manifest = json.loads((run_dir / "manifest.json").read_text())
    gone = {"samples.csv", "drift.csv", "phases.csv"}
    manifest["files"] = [name for name in manifest["files"] if name not in gone]
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    for name in gone:
        (run_dir / name).unlink()
    text = page_of(run_dir)
    assert "This run has no samples.csv" in text
    assert "This run has no drift.csv" in text


def test_runs_of_different_settings_are_marked(run_dir, tmp_path):
    twin, other = (shutil.copytree(run_dir, tmp_path / name) for name in ("twin", "other"))
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["settings"]["dtype"] = "bfloat16"
    (other / "manifest.json").write_text(json.dumps(manifest))
    text = page_of(run_dir, twin, other)
    assert "These runs are of 2 kinds, marked A, B" in text
    assert "kind A" in text
    assert "kind B" in text
    assert ">dtype</th>" in text


def test_runs_of_equal_settings_are_one_kind(run_dir, tmp_path):
    text = page_of(run_dir, shutil.copytree(run_dir, tmp_path / "twin"))
    assert "Trend over runs" in text
    assert "kinds, marked" not in text
    assert "kind B" not in text


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("manifest.json", lambda s: s[: len(s) // 2], "is no JSON"),
        ("manifest.json", lambda s: "[]", "was not written by pcpbench"),
        (
            "manifest.json",
            lambda s: s.replace('"schema_version": 1', '"schema_version": 2'),
            "has schema version 2",
        ),
        (
            "manifest.json",
            lambda s: s.replace('"schema_version": 1', '"schema_version": "x"'),
            "'x'",
        ),
        ("samples.csv", lambda s: s[: len(s) // 2].rstrip("\n"), "cut off in the middle of a line"),
        ("steps.csv", lambda s: s.replace("served_as", "other", 1), "no column served_as"),
        ("summary.csv", lambda s: s + "one,two\n", "has 2 cells"),
        ("drift.csv", lambda s: s.replace("outcome", "verdict", 1), "no column outcome"),
        ("steps.csv", lambda s: "\0" + s, "NUL"),
        ("samples.csv", None, "lists samples.csv, which is not there"),
    ],
)
@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_damaged_run_is_refused_and_nothing_is_written(
    run_dir, capsys, command, name, change, told
):
    if change is None:
        (run_dir / name).unlink()
    else:
        rewrite(run_dir / name, change)
    before = {file: file.read_bytes() for file in run_dir.iterdir()}
    capsys.readouterr()
    assert cli.run([command, str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert name in error
    assert error.count("\n") == 1
    assert {file: file.read_bytes() for file in run_dir.iterdir()} == before


@pytest.mark.parametrize(
    ("command", "name", "change"),
    [
        ("report", "drift.csv", lambda s: s.replace("\nfirst,0,", "\nfirst,zero,", 1)),
        ("report", "steps.csv", lambda s: re.sub(r"(first,\w+,)0", r"\1zero", s)),
        ("report", "samples.csv", lambda s: re.sub(r",[\d.]+\n", ",zero\n", s, count=1)),
        ("trace", "phases.csv", lambda s: re.sub(r",[\d.]+\n", ",zero\n", s, count=1)),
    ],
)
def test_a_number_that_is_none_is_named_with_its_line(run_dir, capsys, command, name, change):
    rewrite(run_dir / name, change)
    capsys.readouterr()
    assert cli.run([command, str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert "line " in error
    assert "'zero'" in error
    assert not list(run_dir.glob("report.html")) + list(run_dir.glob("trace.json"))


@pytest.mark.parametrize("command", ["report", "trace"])
def test_what_is_no_run_is_refused(command, tmp_path, capsys):
    assert cli.run([command, str(tmp_path)]) == 2
    assert "holds no manifest.json" in capsys.readouterr().err
    assert cli.run([command, str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_file_of_yours_is_never_written_over(run_dir, tmp_path, capsys, command):
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    assert cli.run([command, str(run_dir), "--out", str(mine)]) == 2
    assert "name another file" in capsys.readouterr().err
    assert mine.read_text() == "mine"
    out = tmp_path / "out"
    assert cli.run([command, str(run_dir), "--out", str(out)]) == 0
    assert cli.run([command, str(run_dir), "--out", str(out)]) == 0, "its own it may replace"
    assert cli.run([command, str(run_dir), "--out", str(tmp_path)]) == 2
    assert cli.run([command, str(run_dir), "--out", str(tmp_path / "no" / "out")]) == 2


def test_a_run_is_named_once(run_dir, capsys):
    assert cli.run(["report", str(run_dir), str(run_dir)]) == 2
    assert "named twice" in capsys.readouterr().err


def test_results_of_the_fault_catalogue(run_dir, tmp_path, capsys):
    file = tmp_path / "faults.json"
    fault = {
        "name": "stale-<b>",
        "class_id": "K01",
        "description": "Rows keep what they held.",
        "contracts": ["C1"],
    }
    one = {"fault": fault, "world": "pcp 2", "scenario": "s1", "fired": ["C1"], "verdict": "caught"}
    document = {
        "schema_version": 1,
        "command": "faults run",
        "num_faults": 1,
        "num_caught": 1,
        "num_false_alarms": 0,
        "runs": [one],
    }
    file.write_text(json.dumps(document))
    text = page_of(run_dir, file)
    assert "stale-&lt;b&gt;" in text
    assert "1 of 1 faults caught" in text
    for bad in (
        "{",
        "{}",
        json.dumps(document | {"schema_version": 9}),
        '{"command": "faults run"',
    ):
        file.write_text(bad)
        assert cli.run(["report", str(file), "--out", str(tmp_path / "x.html")]) == 2
        assert "faults.json" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_other_commands_show_their_table(run_dir):
    manifest = json.loads((run_dir / "manifest.json").read_text())
    manifest |= {"command": "modes", "files": ["manifest.json", "modes.csv"]}
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    (run_dir / "modes.csv").write_text("mode,outcome,empty\nNONE,pass,\nFULL_<i>,pass,\n")
    text = page_of(run_dir)
    assert "FULL_&lt;i&gt;" in text
    assert ">empty</th>" not in text
    assert cli.run(["trace", str(run_dir)]) == 2


# ------------------------------------------------------------------------------------------- trace


@pytest.fixture
def trace(run_dir, tmp_path):
    out = tmp_path / "trace.json"
    assert cli.run(["trace", str(run_dir), "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_a_trace_is_in_the_trace_event_format(trace):
    assert trace["displayTimeUnit"] == "ms"
    assert "lockstep" in trace["otherData"]["note"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"]
             if e["name"] == "thread_name"}  # fmt: skip
    assert set(names.values()) == {"rank 0", "rank 1"}
    # Perfetto draws a thread 0, and one with its process's number, as that process's main thread.
    numbers = [tid for _, tid in names]
    assert len(set(numbers)) == len(names) == 4
    assert not {0, *(pid for pid, _ in names)} & set(numbers)
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["arm eager", "arm full_and_piecewise"]
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in names


def test_events_of_a_thread_are_in_order_and_nest(trace):
    threads = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    assert len(threads) == 4
    for events in threads.values():
        assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
        ends = []
        for event in events:
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 1e-6, f"{event} sticks out"
            assert ends or event["cat"] == "step", "a phase outside of any step"
            ends.append(end)


def test_a_trace_shows_what_each_arm_did(trace):
    names = defaultdict(set)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            names[event["pid"]].add(event["name"].partition(" ")[0])
    parts = {"step", "update_states", "prepare_inputs", "dispatch", "prepare_attention", "sample",
             "post_update"}  # fmt: skip
    assert parts <= names[1]
    assert parts <= names[2]
    assert "forward" in names[1]
    assert "replay" not in names[1]
    assert {"replay", "launch"} <= names[2]
    steps = [e for e in trace["traceEvents"] if e["name"].startswith("step ") and e["pid"] == 2]
    assert {e["args"]["served_as"] for e in steps} == {"FULL", "PIECEWISE", "IDLE"}
    assert {e["args"]["scenario"] for e in steps} == {"first", "second"}
    assert all(e["args"]["shared"] for e in steps)


def test_a_piecewise_replay_has_several_launches(trace):
    of_arm = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 2]
    thread = [e for e in of_arm if e["tid"] == min(e["tid"] for e in of_arm)]
    piecewise = next(e for e in thread if e["args"].get("served_as") == "PIECEWISE")
    inside = [
        e["name"] for e in thread if piecewise["ts"] <= e["ts"] < piecewise["ts"] + piecewise["dur"]
    ]
    assert inside.count("replay") == 1
    assert inside.count("launch") > 1


def test_a_run_that_was_not_timed_has_no_trace(run_dir, capsys):
    rewrite(run_dir / "phases.csv", lambda text: text.splitlines(True)[0])
    assert cli.run(["trace", str(run_dir)]) == 3
    assert "--repetitions above 0" in capsys.readouterr().err
    assert not (run_dir / "trace.json").exists()


# ----------------------------------------------------------------------------------------- browser

PROBE = """<!doctype html><title>waiting</title><body style="margin:0"><iframe
 style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe><script>
addEventListener('message', event => {{ document.title = event.data; }});
</script>"""
MEASURE = """<script>
const page = document.documentElement;
document.querySelectorAll('details').forEach(one => {{ one.open = true; }});
const cut = [...document.querySelectorAll('svg')].filter(svg => {{
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].some(text => {{
    const box = text.getBoundingClientRect();
    return box.width > 0 && (box.left < frame.left - 2 || box.right > frame.right + 2);
  }});
}}).length;
const style = getComputedStyle(document.body);
parent.postMessage(JSON.stringify({{
  width: page.clientWidth, scroll: page.scrollWidth, plots: document.querySelectorAll('svg').length,
  cut: cut, ink: style.color, surface: style.backgroundColor }}), '*');
</script>"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_in_a_browser(page_text, in_browser, width, dark):
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page_text)
    page = page.replace("</body>", MEASURE.format() + "</body>")
    quoted = page.replace("&", "&amp;").replace('"', "&quot;")
    probe = PROBE.format(width=width, page=quoted)
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    seen = in_browser(probe, "1500,1000", scheme)
    assert seen["width"] == pytest.approx(width, abs=20)
    assert seen["scroll"] <= seen["width"], "the page scrolls sideways"
    assert seen["plots"] >= 8
    assert seen["cut"] == 0, "a plot cuts its text off"
    light = sum(map(int, re.findall(r"\d+", seen["surface"])[:3])) > 380
    assert light is not dark
    assert seen["ink"] != seen["surface"]
