"""What tests of the catalogue and of clean runs do to the engine."""

import pytest

from pcpbench.engine.engine import Engine


@pytest.fixture
def no_memory_at_first(monkeypatch):
    """The machine has no memory for the first step of all, and enough for what comes then.

    Returns the list of steps begun; cleared, the next one is the first again.
    """
    execute, steps = Engine.execute, []

    def starved(*arguments):
        steps.append(1)
        if len(steps) == 1:
            raise RuntimeError("std::bad_alloc")
        return execute(*arguments)

    monkeypatch.setattr(Engine, "execute", starved)
    return steps
