"""Which device and which backend a run gets, on machines that this one is not."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.clock import make_clock
from pcpbench.errors import DeviceMissing, UsageError

CPU = torch.device("cpu")


@pytest.fixture
def set_device(monkeypatch: Any) -> Mock:
    """Two devices; the call that makes one of them the current one."""
    chosen = Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen)
    return chosen


def test_a_device_by_number_becomes_the_current_one(set_device: Mock) -> None:
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    set_device.assert_called_once_with(torch.device("cuda", 1))


@pytest.mark.parametrize("name", ["cpu", "cuda", "auto"])
def test_without_a_number_the_current_one_stays(set_device: Mock, name: str) -> None:
    assert resolve_device(name).type == ("cpu" if name == "cpu" else "cuda")
    set_device.assert_not_called()


def test_a_device_that_is_not_there_is_not_made_current(set_device: Mock) -> None:
    with pytest.raises(DeviceMissing, match="has 2 CUDA devices"):
        resolve_device("cuda:2")
    set_device.assert_not_called()


def test_a_clock_waits_for_its_own_device(monkeypatch: Any) -> None:
    waited = Mock()
    monkeypatch.setattr(torch.accelerator, "synchronize", waited)
    make_clock(torch.device("cuda", 1)).synchronize()
    waited.assert_called_once_with(torch.device("cuda", 1))


@pytest.mark.usefixtures("set_device")
def test_a_backend_and_a_device_that_do_not_go_together_are_bad_input() -> None:
    with pytest.raises(UsageError, match=r"--backend is accelerator.*--device is cpu"):
        resolve_backend("accelerator", CPU)
    with pytest.raises(UsageError, match=r"--backend is host.*--device is cuda:1"):
        resolve_backend("host", torch.device("cuda", 1))
    assert resolve_backend("auto", CPU).name == "host"
    assert resolve_backend("accelerator", torch.device("cuda")).name == "accelerator"


def test_a_machine_without_devices_lacks_one_first(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceMissing, match="--backend host"):
        resolve_backend("accelerator", CPU)
