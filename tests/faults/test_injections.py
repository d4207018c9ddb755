"""Every injection leaves code and engines as it found them, also when the run breaks."""

import importlib
import inspect
import pkgutil
from functools import cache

import pytest
import torch

import pcpbench
from pcpbench.device.backends import resolve_backend
from pcpbench.engine.engine import Engine
from pcpbench.faults import registry
from pcpbench.faults.fault import Site
from pcpbench.modes import ARM_MODES
from pcpbench.session.faults_request import options_of

CPU = torch.device("cpu")
ACCUSED = ("engine", "model", "device", "pcp_manager", "pcp_partition", "pcp_rows", "dcp")


@cache
def engine_of(setting):
    config = options_of(setting).engine_config(
        ARM_MODES["full"],
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        block_size=16,
        num_blocks=9,
    )
    return Engine(config, CPU, resolve_backend("auto", CPU))


def code():
    """Everything that a name of the engine's modules or classes stands for."""
    found = {}
    # All imports come first: each leaves its name in the package around it.
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(pcpbench.__path__, "pcpbench.")
        if module.name.split(".")[1] in ACCUSED and "kernels" not in module.name
    ]
    for loaded in modules:
        for name, value in vars(loaded).items():
            found[loaded.__name__, name] = value
            if inspect.isclass(value) and value.__module__.startswith("pcpbench"):
                found.update({(value, attribute): it for attribute, it in vars(value).items()})
    return {key: id(value) for key, value in found.items() if key[1] != "__doc__"}


def state(engine):
    """Where each buffer is, and what dispatch chooses from in which order."""
    buffers = engine.address_book._getters.items()
    where = {name: (id(get()), get().data_ptr()) for name, get in buffers}
    return where, tuple(engine.dispatcher.descriptors)


def raise_if(changed):
    assert changed, "the injection changes nothing that it has to put back"
    raise ZeroDivisionError


@pytest.mark.parametrize("fault", registry.SHIPPED, ids=lambda fault: fault.name)
def test_code_and_buffers_are_put_back_after_an_error(fault):
    engine = engine_of(fault.setting)
    site = Site({} if fault.at_capture else {"full": engine})
    before = code(), state(engine)
    with pytest.raises(ZeroDivisionError), fault.inject(site):
        raise_if((code(), state(engine)) != before or not fault.contracts)
    assert code() == before[0]
    assert state(engine) == before[1]
