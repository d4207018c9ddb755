"""The CPU kernels against expectations that walk over tokens and positions one by one."""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pcpbench.model.attention import kv_cache_write, mla_attention, rescale_partial

BATCHES = {
    "one": [(1, 1)],
    "decode": [(5, 1), (1, 1), (17, 1), (4, 1), (16, 1)],
    "equal": [(8, 1), (8, 1)],
    "prefill": [(9, 9), (3, 3)],
    "chunk": [(20, 7)],
    "mixed": [(6, 1), (12, 5), (7, 1), (10, 5), (5, 5)],
    "verify": [(9, 4), (13, 4), (4, 4)],
    "holes": [(6, 1), (9, 0), (7, 1), (0, 0), (8, 2)],
}


def check(case, out, lse):
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[out.dtype]
    torch.testing.assert_close(out.double(), case.out, rtol=tolerance, atol=tolerance)
    # lse is -inf in the same places: assert_close treats equal infinities as close.
    torch.testing.assert_close(lse.double(), case.lse, rtol=2e-5, atol=2e-5)


def run(case):
    out, lse = case.empty_results()
    mla_attention(*case.args, out, lse)
    return out, lse


@pytest.mark.parametrize("dcp", [(1, 0, 1), (2, 0, 1), (2, 1, 2), (4, 3, 4), (4, 1, 1)])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_attention_sees_what_it_may_and_nothing_else(make_case, rows, dcp):
    for padding in (0, 3):
        case = make_case(rows, dcp=dcp, extra_tokens=padding, extra_rows=padding)
        check(case, *run(case))


@pytest.mark.parametrize("window", [1, 3, 6, 40])
@pytest.mark.parametrize("dcp", [(1, 0, 1), (2, 1, 2), (4, 3, 1)])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_a_window_ends_what_a_query_sees(make_case, rows, dcp, window):
    """Keys before it are NaN and their columns out of range: with dcp 4, whole shards are empty."""
    for padding in (0, 3):
        case = make_case(
            rows, dcp=dcp, window=window, extra_tokens=padding, extra_rows=padding, block_size=2
        )
        check(case, *run(case))


def test_nan_key_behind_the_window_stays_with_those_who_see_it(make_case):
    """Positions 6 .. 9 with a window of 3; position 5 is seen by the first two only."""
    case = make_case([(10, 4), (10, 4)], window=3)
    clean, _ = run(case)
    block = case.args[2][0, 1]
    case.args[1][block, 1] = math.nan
    out, lse = run(case)
    assert out[:2].isnan().all()
    assert lse[:2].isnan().all()
    assert torch.equal(out[2:], clean[2:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_only_inputs_and_result(make_case, dtype):
    case = make_case(BATCHES["mixed"], dtype=dtype)
    check(case, *run(case))


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_padding_changes_no_bit_of_a_real_row(make_case, rows):
    num_tokens = sum(n for _, n in rows)
    out, lse = run(make_case(rows))
    for tokens, extra_rows in ((1, 0), (0, 3), (40, 9)):
        padded = run(make_case(rows, extra_tokens=tokens, extra_rows=extra_rows))
        assert torch.equal(padded[0][:num_tokens], out)
        assert torch.equal(padded[1][:num_tokens], lse)


def test_local_length_buffer_is_what_counts(make_case):
    """With a stale buffer the last token's result is that of the stale length."""
    case = make_case([(12, 1)], dcp=(2, 0, 1))
    stale = make_case([(8, 1)], dcp=(2, 0, 1))
    case.args[5].fill_(4)
    out, _ = run(case)
    wanted = case.args[0].double() @ case.args[1].flatten(0, 1).double().T
    assert not torch.allclose(out.double(), case.out, atol=1e-3)
    slots = (case.args[2][0, 0].long() * 4 + torch.arange(4)).tolist()
    weights = (wanted[..., slots] * 0.2).softmax(-1)
    keys = case.args[1].flatten(0, 1)[slots, :32].double()
    torch.testing.assert_close(out.double(), weights @ keys, rtol=1e-5, atol=1e-5)
    assert stale.args[5].tolist() == [4]


def test_local_length_past_the_table_is_cut_not_followed(make_case):
    case = make_case([(12, 1)], dcp=(2, 0, 1), block_size=2)
    case.args[2][:, 3:] = 0
    case.args[1][0] = 0.0
    case.args[5].fill_(10**6)
    out, _ = run(case)
    assert out.isfinite().all()


def test_nan_key_of_a_later_token_stays_with_it(make_case):
    case = make_case([(6, 4), (5, 4)])
    clean_out, clean_lse = run(case)
    block = case.args[2][0, 1]
    case.args[1][block, 0] = math.nan  # position 4 of row 0: its tokens 2 and 3 see it
    out, lse = run(case)
    assert out[2:4].isnan().all()
    assert lse[2:4].isnan().all()
    untouched = [0, 1, 4, 5, 6, 7]
    assert torch.equal(out[untouched], clean_out[untouched])
    assert torch.equal(lse[untouched], clean_lse[untouched])


def test_nan_query_stays_with_its_token(make_case):
    case = make_case([(6, 1), (5, 1), (7, 1)])
    clean, _ = run(case)
    case.args[0][1] = math.nan
    out, _ = run(case)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_no_token_at_all(make_case):
    out, lse = run(make_case([(0, 0)], extra_tokens=2))
    assert not out.any()
    assert (lse == -math.inf).all()
    out, _ = run(make_case([(0, 0)]))
    assert out.shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pad_slots_write_nothing(dtype):
    cache = torch.full((3, 4, 6), 9.0, dtype=dtype)
    kv = torch.randn(5, 6).to(dtype)
    kv[1] = math.nan
    kv_cache_write(kv, torch.tensor([11, -1, 4, -1, 0]), cache)
    flat = cache.flatten(0, 1)
    assert torch.equal(flat[[11, 4, 0]], kv[[0, 2, 4]])
    others = [slot for slot in range(12) if slot not in (11, 4, 0)]
    assert (flat[others] == 9.0).all()
    before = cache.clone()
    kv_cache_write(kv, torch.full((5,), -1), cache)
    assert torch.equal(cache, before)
    kv_cache_write(kv[2:3], torch.tensor([1]), cache)
    assert torch.equal(flat[1], kv[2])


def test_write_wants_one_slot_for_each_token():
    with pytest.raises(ValueError, match="2 tokens and 3 slots"):
        kv_cache_write(torch.zeros(2, 4), torch.zeros(3).long(), torch.zeros(1, 4, 4))


@pytest.mark.parametrize("rows", [[(9, 1), (1, 1), (3, 2)], [(1, 1)]])
def test_shards_merge_to_the_whole(make_case, rows):
    """The second batch leaves three of four shards without a key."""
    whole = run(make_case(rows, extra_tokens=2))
    shards = [run(make_case(rows, dcp=(4, rank, 1), extra_tokens=2)) for rank in range(4)]
    lses = torch.stack([lse for _, lse in shards])
    merged = sum(rescale_partial(out, lse, lses) for out, lse in shards)
    torch.testing.assert_close(merged, whole[0], rtol=1e-5, atol=1e-5)
    assert not merged[-2:].any()


def test_rescale_keeps_a_real_nan():
    lses = torch.tensor([[[math.nan]], [[0.0]]])
    assert rescale_partial(torch.ones(1, 1, 2), lses[0], lses).isnan().all()


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """What a capture sees of host reads: `numpy` and `tolist` never reach the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_recorders_see_one_op_with_declared_mutations(make_case):
    case = make_case(BATCHES["mixed"], extra_tokens=2)
    out, lse = case.empty_results()
    with Calls() as calls, Recorder() as recorder:
        mla_attention(*case.args, out, lse)
        kv_cache_write(case.args[1][1], torch.tensor([3, -1, 5, 6]), case.args[1])
    assert [op for op in recorder.ops if op.startswith("pcpbench")] == [
        "pcpbench.mla_attention.default",
        "pcpbench.kv_cache_write.default",
    ]
    assert not {"numpy", "tolist", "item"} & set(calls.names)
    check(case, out, lse)
    schemas = (torch.ops.pcpbench.mla_attention.default, torch.ops.pcpbench.kv_cache_write.default)
    written = [
        [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
        for op in schemas
    ]
    assert written == [["out", "lse"], ["kv_cache"]]
