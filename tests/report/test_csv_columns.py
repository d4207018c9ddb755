import csv
import io
from pathlib import Path

import pytest

from pcpbench.report import columns
from pcpbench.report.csv_files import address_row, capture_row, header, lines

DOCS = Path(__file__).parents[2] / "docs" / "csv.md"


def test_the_page_about_columns_is_current():
    assert DOCS.read_text() == columns.markdown(), (
        "run: python -m pcpbench.report.columns > docs/csv.md"
    )


@pytest.mark.parametrize(("name", "what", "table"), columns.FILES)
def test_every_column_has_one_name_and_a_meaning(name, what, table):
    names = [column.name for column in table]
    assert len(set(names)) == len(names)
    assert all(column.meaning and "|" not in column.meaning for column in table)


def test_metrics_have_the_names_of_vllm():
    names = {column.name for column in columns.SUMMARY}
    for metric in ("tpot", "itl", "ttft"):
        assert {f"{s}_{metric}_ms" for s in ("mean", "median", "std", "p99")} <= names


def test_units_are_in_the_names():
    for _, _, table in columns.FILES:
        for column in table:
            if column.unit in ("ms", "s"):
                assert column.name.endswith(f"_{column.unit}")
            if column.unit == "%":
                assert column.name.endswith("_percent")


TWO = (columns.Column("a", "", "one"), columns.Column("b", "", "two"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0, "0"),
        (0.0, "0.0"),
        (0.1 + 0.2, "0.30000000000000004"),
        (True, "true"),
        (False, "false"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ("two\nlines", "two lines"),
        ("a,b", '"a,b"'),
    ],
)
def test_a_value_becomes_a_cell(value, text):
    assert lines(TWO, [{"a": value, "b": 7}]) == f"{text},7\n"


@pytest.mark.parametrize("row", [{"a": 1}, {"a": 1, "b": 2, "c": 3}])
def test_a_row_with_other_columns_is_an_error(row):
    with pytest.raises(ValueError, match=r"differ in (b|c)"):
        lines(TWO, [row])


def test_rows_follow_the_order_of_the_columns():
    assert header(TWO) + lines(TWO, [{"b": 2, "a": 1}]) == "a,b\n1,2\n"


def test_capture_rows(make):
    result = make.capture(unowned=True)
    rows = [capture_row(result.graphs[2], 40_960)]
    (found,) = csv.DictReader(io.StringIO(header(columns.CAPTURE) + lines(columns.CAPTURE, rows)))

    assert found["descriptor"] == "FULL[reqs=8,tokens=8]"
    assert float(found["capture_ms"]) == pytest.approx(13.1)
    assert found["pool_bytes_delta"] == "40960"
    assert found["num_reqs"] == "8"


def test_address_rows(make):
    uses = make.capture(unowned=True).addresses
    owned, unowned = address_row(uses[1]), address_row(uses[-1])

    assert owned["buffer"] == "rank0.kv_cache.0"
    assert owned["access"] == "read+write"
    assert owned["address"] == "0x7f0000100000"
    assert owned["shape"] == "256x16x4"
    assert unowned["buffer"] is None
    assert unowned["access"] == "read"
    lines(columns.ADDRESS_BOOK, [owned, unowned])
