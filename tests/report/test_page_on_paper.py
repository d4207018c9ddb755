"""What is on paper of a page whose tables are folded away on a screen."""

import json
import re
from pathlib import Path

import pytest

from pcpbench.report.page import page as page_module
from pcpbench.report.page.page import render_page
from pcpbench.report.stored import read_run

STYLE = (Path(page_module.__file__).parent / "page.css").read_text(encoding="utf-8")
LOOK = """<script>
const seen = () => [...document.querySelectorAll('details table')].map(one =>
  one.checkVisibility() && one.getBoundingClientRect().height > 0);
const style = document.querySelector('style');
const screen = seen();
style.textContent = style.textContent.replace('@media print', '@media all');
const paper = seen();
const width = document.documentElement.clientWidth;
document.title = JSON.stringify({
  screen: screen, paper: paper,
  wide: [...document.querySelectorAll('table')].filter(one =>
    one.getBoundingClientRect().right > width + 1).length });
</script>"""


@pytest.fixture
def text(tmp_path, fake):
    """A page with a folded table and one of many columns."""
    from pcpbench.session.baseline import samples_bytes

    manifest = {"schema_version": 1, "pcpbench_version": "0", "command": "gate",
                "outcome": "pass", "started_at": "2026-01-01T00:00:00+00:00"}  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    run = fake.measured((0.8, 0.81, 0.82))
    (tmp_path / "samples.jsonl").write_bytes(samples_bytes(run))
    names = ["rule", "metric", "scenario", "verdict", *(f"some_column_{n}" for n in range(20))]
    cells = ["tpot:2.5%", "tpot", "s", "pass", *["0.123456789"] * 20]
    table = f"{','.join(names)}\n{','.join(cells)}\n"
    (tmp_path / "gate.csv").write_text(table, encoding="utf-8")
    return render_page([read_run(tmp_path, ("gate.csv",))])


def rules_of(style, medium):
    """Selector -> declarations of the block of a medium."""
    block = style[style.index(f"@media {medium}") :]
    found = {}
    for line in block.splitlines()[1:]:
        if line.startswith("}"):
            break
        selectors, _, declarations = line.strip().removesuffix("}").partition("{")
        pairs = [part.split(":", 1) for part in declarations.split(";") if ":" in part]
        known = {name.strip(): value.strip() for name, value in pairs}
        for selector in selectors.split(","):
            found[selector.strip()] = {**found.get(selector.strip(), {}), **known}
    return found


def test_folded_tables_are_unfolded_for_paper_and_none_is_cut(text):
    assert STYLE in text
    paper = rules_of(STYLE, "print")
    assert paper["details::details-content"]["content-visibility"] == "visible"
    assert paper["details::details-content"]["display"] == "block"
    assert paper[".scroll"] == {"max-height": "none", "overflow": "visible"}
    assert paper["table"]["max-width"] == "100%"
    assert paper["table"]["overflow-wrap"] == "anywhere"
    assert paper[".number"]["white-space"] == "normal"
    assert paper["td:first-child"]["white-space"] == "normal"
    screen = STYLE[: STYLE.index("@media print")]
    assert "details-content" not in screen, "on a screen they stay folded"


def test_a_folded_table_on_paper_in_a_browser(text, in_browser):
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    seen = in_browser(page.replace("</body>", LOOK + "</body>"), "800,1000")
    assert seen["screen"]
    assert not any(seen["screen"]), "on a screen they are folded"
    assert all(seen["paper"]), "on paper they are not"
    assert seen["wide"] == 0, "a table is cut at the edge of the paper"
