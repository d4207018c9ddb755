import pytest

from pcpbench.report.capture_view import pattern_of, print_capture
from pcpbench.report.doctor_view import print_doctor
from pcpbench.results import CaptureResult


@pytest.fixture(params=[80, 140])
def width(request):
    return request.param


def fits(text, width):
    return max(len(line) for line in text.splitlines()) <= width and "\u2026" not in text


def test_a_capture(make, width):
    text = make.render(print_capture, make.capture(), width)
    line = make.unwrapped(text)

    assert text.startswith("PASS  full_and_piecewise: 4 descriptors captured in 51.6 ms")
    assert fits(text, width)
    assert "FULL[reqs=8,tokens=8]" in text
    assert "40.0 KiB" in text
    assert "Notice capture_sizes: capture size 64 is not used." in line
    assert "Files results/20261129T170039Z-capture-3f2a" in line


def test_buffers_that_differ_in_a_number_share_a_line(make, width):
    text = make.render(print_capture, make.capture(), width)
    rows = {row.split()[0]: row.split() for row in text.splitlines() if row.startswith("rank")}

    assert set(rows) == {"rank*.input_ids", "rank*.kv_cache.*"}
    assert rows["rank*.kv_cache.*"][1:4] == ["4", "256.0", "KiB"]
    assert rows["rank*.kv_cache.*"][-2:] == ["4", "4"]  # read and written by four graphs
    assert rows["rank*.input_ids"][-2:] == ["4", "-"]


def test_unowned_memory_comes_before_everything_else(make, width):
    text = make.render(print_capture, make.capture(unowned=True), width)
    line = make.unwrapped(text)

    assert text.startswith("FAIL")
    assert fits(text, width)
    assert "1 of 4 graphs touch 1 unowned buffers" in line
    assert "0x7f00dead0000 by aten.mul.Tensor, pcpbench/model/decoder.py:88" in line
    assert text.index("Unowned") < text.index("Descriptor")


def test_capturing_nothing_is_no_pass(make):
    result = CaptureResult(
        mode="piecewise",
        graphs=(),
        addresses=(),
        pool_bytes=0,
        settings={},
        environment=make.environment,
    )
    assert make.render(print_capture, result, 80).startswith("NOT COMPARED  piecewise: no graph")
    assert result.outcome.exit_code == 3


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("rank0.kv_cache.1", "rank*.kv_cache.*"),
        ("tp12.layers.3.w2v.weight", "tp*.layers.*.w2v.weight"),
        ("rank1.input_ids", "rank*.input_ids"),
    ],
)
def test_only_numbers_of_ranks_and_layers_are_left_open(name, pattern):
    assert pattern_of(name) == pattern


def test_what_can_run_here(make, width):
    text = make.render(print_doctor, make.doctor(), width)
    line = make.unwrapped(text)

    assert fits(text, width)
    assert "host graphs ok recorded and replayed on cpu" in line
    assert "accelerator graphs no torch finds no CUDA device: install" in line
    assert "Triton kernels limited" in line
    assert "torch 2.13.0" in line
    assert "Some CPU @ 2.9 GHz" in line
    assert "Set or changed around vllm, as there is no accelerator:" in line
    assert "platform plugin vllm.platform_plugins" in line
    assert "no pinned memory" in line
