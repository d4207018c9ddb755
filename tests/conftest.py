"""What tests of several packages share: a fault, the browser for pages, how Triton runs here."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

# Whether kernels are interpreted is settled when triton is first imported, by whichever test that
# is; vLLM's worker code needs it where there is no GPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


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


class FakeGate:
    """Samples of processes that nobody ran: what they hold is what a test says."""

    @staticmethod
    def scenario(
        name="s", ratio=0.8, base_s=3e-3, capture_s=0.25, plan_hash="p", num_wrong=0, slow=None
    ):
        """Every metric and statistic has numbers of its own. slow: factors such as "tpot.p99" on
        the candidate's; ".ratio" is what pairs have."""
        from pcpbench.gate_samples import TIME_METRICS, MetricSample, ScenarioSample
        from pcpbench.results import Stat

        def times(number, metric):
            factors = {
                kind: (slow or {}).get(f"{metric}.{kind}", 1.0)
                for kind in ("mean", "median", "p99", "ratio")
            }
            base = base_s * (1 + 0.3 * number)
            ours = base * ratio

            def stat(seconds, mean=1.0, median=1.0, p99=1.0):
                return Stat(
                    mean=1.1 * seconds * mean,
                    median=seconds * median,
                    std=0.0,
                    p99=2 * seconds * p99,
                    num_samples=9,
                )

            pairs = factors.pop("ratio")
            return MetricSample(
                base=stat(base), candidate=stat(ours, **factors), ratio=ratio * pairs, num_pairs=9
            )

        return ScenarioSample(
            scenario=name,
            plan_hash=plan_hash,
            metrics={name: times(number, name) for number, name in enumerate(TIME_METRICS)},
            capture_s=capture_s,
            num_wrong=num_wrong,
        )

    def process(self, *scenarios, wall_s=1.0, started_at=""):
        from pcpbench.gate_samples import ProcessSample
        from pcpbench.records import Environment

        return ProcessSample(
            scenarios=tuple(scenarios or [self.scenario()]),
            environment=Environment(),
            wall_s=wall_s,
            started_at=started_at,
        )

    def processes(self, ratios, **scenario):
        return tuple(
            self.process(self.scenario(ratio=ratio, **scenario), started_at=f"second {second}")
            for second, ratio in enumerate(ratios)
        )

    @staticmethod
    def judged(name="s", outcome="pass", drifts=0, violations=0, steps=(10, 10), plan_hash="p"):
        from pcpbench.gate_samples import JudgedScenario

        return JudgedScenario(
            scenario=name,
            plan_hash=plan_hash,
            outcome=outcome,
            reasons=() if outcome == "pass" else ("something was wrong",),
            num_drifts=drifts,
            num_violations=violations,
            decode_steps=steps[1],
            steps_full=steps[0],
        )

    def measured(self, ratios, **changes):
        import msgspec

        from pcpbench.engine_options import EngineOptions
        from pcpbench.gate_jobs import Machine, Measured, SampleJob
        from pcpbench.records import Environment

        measured = Measured(
            job=SampleJob(
                base="eager", candidate="full", options=EngineOptions(), scenarios=("s",)
            ),
            settings={"base": "eager", "candidate": "full", "dtype": "float32"},
            settings_hash="h",
            code_hash="c",
            machine=Machine(id="m", cpu="a CPU", num_cpus=2),
            environment=Environment(versions={"torch": "2.13.0"}),
            created_at="2026-01-01T00:00:00+00:00",
            judged=(self.judged(),),
            processes=self.processes(ratios),
        )
        return msgspec.structs.replace(measured, **changes)


@pytest.fixture
def fake():
    return FakeGate()


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture
def in_browser(tmp_path):
    """Shows HTML in headless Chromium and returns what the page has put into its title as JSON.

    Skips the test where there is none, before anything is rendered.
    """
    named = os.environ.get("PCPBENCH_BROWSER", "")
    program = named or next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if not program:
        pytest.skip(
            f"no browser: install one of {', '.join(BROWSERS)}, or set PCPBENCH_BROWSER to a "
            "Chromium (131 or newer), to look at the page in it"
        )

    def show(text, size="1500,1000", *more):
        probe = tmp_path / "probe.html"
        probe.write_text(text, encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={size}",
                 "--virtual-time-budget=5000"]  # fmt: skip
        done = subprocess.run(
            [program, *flags, *more, "--dump-dom", probe.as_uri()],
            capture_output=True,
            text=True,
            timeout=60,
        )
        title = re.search(r"<title>(.*?)</title>", done.stdout)
        assert title, done.stderr
        return json.loads(title.group(1).replace("&quot;", '"'))

    return show
