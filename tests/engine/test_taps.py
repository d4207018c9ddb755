"""Taps of an engine: nothing when off; in a captured graph the copy is replayed, buffers known."""

import numpy as np
import pytest
import torch

from pcpbench.config import CompilationConfig, EngineConfig, ParallelConfig
from pcpbench.device.host_graph import HostGraphBackend
from pcpbench.engine import taps as taps_module
from pcpbench.engine.engine import Engine
from pcpbench.engine.taps import TapBuffers
from pcpbench.model import mla
from pcpbench.model.context import ForwardContext
from pcpbench.model.presets import TINY
from pcpbench.modes import CUDAGraphMode

CPU = torch.device("cpu")


def captured(taps):
    config = EngineConfig(
        parallel_config=ParallelConfig(prefill_context_parallel_size=2),
        compilation_config=CompilationConfig(
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(1, 4)
        ),
    )
    engine = Engine(config, CPU, HostGraphBackend(), taps)
    engine.capture()
    return engine


def num_ops(engine):
    return [graph.num_ops for graph in engine.graphs.captured]


def test_off_means_that_no_op_and_no_buffer_is_there(monkeypatch):
    plain = captured(taps=False)
    assert not any("tap." in (use.name or "") for use in plain.graphs.addresses)

    def refuse(*_):
        raise AssertionError("nobody listens")

    monkeypatch.setattr(ForwardContext, "tap", lambda *_: None)
    monkeypatch.setattr(mla, "kv_cache_read", refuse)
    monkeypatch.setattr(taps_module.TapBuffers, "put", refuse)
    assert num_ops(captured(taps=False)) == num_ops(plain)


def test_on_means_a_copy_a_point_into_registered_memory():
    plain, tapped = captured(taps=False), captured(taps=True)
    points = len(tapped.workers[0].taps.points)
    read_back = 4  # clamp, compare, index_select, masked_fill: twice, once a layer
    extra = 2 * (points + 2 * read_back)
    for before, after in zip(num_ops(plain), num_ops(tapped), strict=True):
        assert 2 * points <= after - before <= extra
    names = {use.name for use in tapped.graphs.addresses}
    assert None not in names
    assert {"rank0.tap.-1.embed.hidden", "rank1.tap.1.mla_attention.out"} <= names
    assert all(not tapped.address_book.changes(g.descriptor) for g in tapped.graphs.captured)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_not_written_is_left_out_and_what_was_is_copied(dtype):
    kept = TapBuffers(
        TINY, tp_size=1, dcp_size=1, pcp_size=2, max_num_tokens=4, dtype=dtype, device=CPU
    )
    kept.put(0, "qkv_proj.latent", torch.full((3, 48), torch.nan, dtype=dtype))
    kept.put(1, "pcp_all_gather.latent", torch.ones(6, 48, dtype=dtype))
    latent, gathered = kept.records(1, 3)
    assert (latent.rank, latent.layer, latent.op, latent.tensor) == (1, 0, "qkv_proj", "latent")
    assert latent.values.shape == (3, 48)
    assert gathered.values.shape == (6, 48)
    assert gathered.is_gathered
    assert latent.order < gathered.order
    kept.put(0, "qkv_proj.latent", torch.zeros(3, 48, dtype=dtype))
    values = latent.values.view(np.uint16 if dtype is torch.bfloat16 else np.uint32)
    assert values.all(), "a record is a copy"
    kept.clear()
    assert list(kept.records(1, 3)) == []


def test_a_point_that_is_none_is_an_error():
    kept = TapBuffers(
        TINY, tp_size=1, dcp_size=1, pcp_size=1, max_num_tokens=4, dtype=torch.float32, device=CPU
    )
    with pytest.raises(KeyError):
        kept.put(0, "dcp_merge.out", torch.zeros(1, 4, 32))
