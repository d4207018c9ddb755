"""What `doctor` says of a machine that lacks something."""

import importlib.util

import pytest
import torch

from pcpbench import doctor
from pcpbench.results import Ability


@pytest.mark.parametrize(("has_gpu", "status"), [(False, Ability.LIMITED), (True, Ability.NO)])
def test_without_triton_only_a_cpu_has_anything_to_run(monkeypatch, has_gpu, status):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    row = doctor._triton_row()
    assert row.status is status
    assert "a GPU runs nothing without kernels" in row.why
