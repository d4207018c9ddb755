"""What tests of several packages plant in the engine."""

import pytest


@pytest.fixture
def sample_the_worst(monkeypatch):
    """Called, makes every engine sample the least likely token."""

    def plant():
        from pcpbench.engine.worker import Worker

        sample = Worker.sample

        async def faulty(self, hidden, plan):
            sampled = await sample(self, hidden, plan)
            sampled.tokens = sampled.logits.argmin(-1)
            return sampled

        monkeypatch.setattr(Worker, "sample", faulty)

    return plant
