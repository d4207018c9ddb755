"""Verdicts over what engines told, from JSON lines as a process writes them."""

import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from pcpbench.engine_request import EngineRequest
from pcpbench.engine_results import ArmRun, Event, Generation, Ready
from pcpbench.results import Outcome
from pcpbench.session.engine_judging import Verdict

LENGTHS = {"p0": 4, "p1": 3}
VOCAB = 16


def row(request, index, generation=0):
    """Log-probabilities of a context that is the same in every arm."""
    logits = np.random.default_rng([ord(request[-1]), index]).standard_normal(VOCAB) * 3
    return logits - np.log(np.exp(logits).sum())


class Told:
    """What one arm's engine told, before anything is changed in it."""

    def __init__(self, ranks=1, pcp=1, modes=None, timed=1):
        self.workers = [
            {"rank": r, "runner": "Runner", "pcp_manager": pcp > 1, "pcp_size": pcp,
             "dcp_size": 1, "cudagraph_mode": "FULL_DECODE_ONLY" if modes else "NONE"}
            for r in range(ranks)
        ]  # fmt: skip
        steps = sum((modes or {"NONE": 9}).values())
        self.counts = [
            {"rank": r, "steps": steps, "modes": dict(modes or {"NONE": 9}),
             "partitioned": steps if pcp > 1 else 0}
            for r in range(ranks)
        ]  # fmt: skip
        self.rows = {
            name: [row(name, i) for i in range(length)] for name, length in LENGTHS.items()
        }
        self.tokens = {
            name: [int(each.argmax()) for each in rows] for name, rows in self.rows.items()
        }
        self.timed = timed
        self.again = {}
        self.seconds = 0.01

    def flip(self, request, index, gap):
        """The second likeliest token comes out `gap` above the first."""
        mine = self.rows[request][index]
        first, second = (int(t) for t in np.argsort(mine)[[-1, -2]])
        mine[second] = mine[first] + gap
        self.tokens[request][index] = second

    def lines(self):
        yield {"event": "started", "pid": 1, "versions": {}}
        yield {"event": "ready", "init_s": 1.0, "workers": self.workers}
        for number in range(1 + self.timed):
            tokens = {**self.tokens, **(self.again if number else {})}
            yield {
                "event": "generated", "repetition": number, "wall_s": 1.0, "workers": self.counts,
                "requests": [
                    {"request": name, "tokens": tokens[name], "ttft_s": self.seconds,
                     "tpot_s": self.seconds,
                     "logprobs": None if number else [each.tolist() for each in rows]}
                    for name, rows in self.rows.items()
                ],
            }  # fmt: skip
        yield {"event": "done"}

    def run(self, arm):
        events = [msgspec.json.decode(json.dumps(line), type=Event) for line in self.lines()]
        ready = next(event for event in events if isinstance(event, Ready))
        return ArmRun(
            arm=arm,
            init_s=ready.init_s,
            workers=ready.workers,
            generations=tuple(event for event in events if isinstance(event, Generation)),
        )


@pytest.fixture
def told():
    """The arms of `compare reference full --pcp 2`, all sound."""
    return SimpleNamespace(
        reference=Told(),
        eager=Told(ranks=2, pcp=2),
        full=Told(ranks=2, pcp=2, modes={"NONE": 2, "FULL": 7}),
    )


def judge(told, fault="", base="reference", candidate="full", dtype="float32"):
    request = EngineRequest(base=base, candidate=candidate, pcp=2)
    verdict = Verdict(request.arms, LENGTHS, dtype, fault)
    verdict.judge(
        {arm.label: getattr(told, arm.label).run(arm.label) for arm in request.arms},
        base,
        candidate,
    )
    return verdict


def test_sound_arms_pass(told):
    told.full.seconds = 0.005
    verdict = judge(told)
    assert (verdict.outcome, verdict.reasons) == (Outcome.PASS, ())
    assert [row.twin for row in verdict.rows] == [None, "reference", "eager"]
    assert [row.num_rows for row in verdict.rows] == [0, 7, 7]
    assert verdict.rows[2].agreement == 1.0
    assert verdict.rows[2].tpot_ratio.median == pytest.approx(0.5)
    assert verdict.rows[1].tpot_ratio is None


def failed(told, *words, **settings):
    verdict = judge(told, **settings)
    assert verdict.outcome is Outcome.FAIL, verdict.reasons
    assert all(any(word in reason for reason in verdict.reasons) for word in words), verdict.reasons
    assert all(row.tpot_ratio is None for row in verdict.rows)
    return verdict


def not_compared(told, *words, **settings):
    verdict = judge(told, **settings)
    assert verdict.outcome is Outcome.NOT_COMPARED, verdict.reasons
    assert all(any(word in reason for reason in verdict.reasons) for word in words), verdict.reasons
    return verdict


def test_one_log_probability_that_is_off_fails_though_no_token_changes(told):
    least = int(told.full.rows["p1"][2].argmin())
    told.full.rows["p1"][2][least] -= 0.02
    verdict = failed(told, "full: p1 token 2: a log-probability is 0.02")
    assert verdict.rows[2].agreement == 1.0
    assert verdict.rows[2].dlogprob_at == "p1 token 2"


def test_a_drift_within_the_budget_passes(told):
    told.full.rows["p1"][2] += 1e-4
    verdict = judge(told)
    assert verdict.outcome is Outcome.PASS
    assert verdict.rows[2].max_dlogprob == pytest.approx(1e-4)


def test_half_precision_has_a_wider_budget(told):
    least = int(told.full.rows["p1"][2].argmin())
    told.full.rows["p1"][2][least] -= 0.02
    assert judge(told, dtype="bfloat16").outcome is Outcome.PASS


def noisy(told, scale):
    """Every row of the candidate is off by normal noise, no token for it."""
    rng = np.random.default_rng(3)
    for name, rows in told.full.rows.items():
        for index, mine in enumerate(rows):
            mine += rng.standard_normal(VOCAB) * scale
            told.full.tokens[name][index] = told.eager.tokens[name][index]
            mine[told.full.tokens[name][index]] = mine.max() + 1e-3


def test_noise_that_no_row_is_too_far_for_is_too_much_for_the_middle_row(told):
    noisy(told, 0.2)
    (row,) = failed(told, "full: half of the 7 rows", dtype="bfloat16").rows[2:]
    assert row.max_dlogprob < row.limit
    assert row.median_dlogprob > row.median_limit
    assert not row.flips


def test_noise_of_sixteen_bits_passes(told):
    noisy(told, 0.02)
    (row,) = judge(told, dtype="bfloat16").rows[2:]
    assert 0.02 < row.median_dlogprob < row.median_limit < row.limit / 2


def test_the_middle_row_has_the_limit_of_every_row_in_float32(told):
    told.full.rows["p1"][2] += 1e-4
    row = judge(told).rows[2]
    assert row.median_dlogprob == 0.0
    assert row.median_limit == pytest.approx(2e-4 * 3, rel=0.4)


def test_an_arm_of_which_less_than_half_was_compared_is_not_compared(told):
    for name in LENGTHS:
        for arm in ("reference", "eager", "full"):
            rows = getattr(told, arm).rows[name][0]
            first, second = np.argsort(rows)[[-1, -2]]
            rows[second] = rows[first] - 1e-5
        told.full.flip(name, 0, 1e-5)
    words = "full: only 2 of 7 output tokens were compared, less than 50%"
    verdict = not_compared(told, words, "use --dtype float32")
    assert not any(flip.why for flip in verdict.rows[2].flips)


def test_a_flip_at_a_tie_is_explained_and_what_follows_is_not_compared(told):
    for name in ("reference", "eager", "full"):  # all hold the two tokens 1e-5 apart
        rows = getattr(told, name).rows["p0"][1]
        first, second = np.argsort(rows)[[-1, -2]]
        rows[second] = rows[first] - 1e-5
    told.full.flip("p0", 1, 1e-5)
    for index in (2, 3):  # other contexts
        told.full.rows["p0"][index] = row("p9", index)
        told.full.tokens["p0"][index] = int(row("p9", index).argmax())
    verdict = judge(told)
    assert verdict.outcome is Outcome.PASS, verdict.reasons
    (flip,) = verdict.rows[2].flips
    assert (flip.request, flip.token_index, flip.why) == ("p0", 1, "")
    assert verdict.rows[2].num_rows == 2 + 3


def test_a_flip_over_a_gap_fails(told):
    told.full.flip("p0", 1, 0.1)
    verdict = failed(told, "full: p0 token 1", "1 generations leave")
    assert "over its budget" in verdict.rows[2].flips[0].why


def test_a_token_that_is_not_its_own_rows_likeliest_fails(told):
    told.full.tokens["p0"][1] = int(told.full.rows["p0"][1].argmin())
    failed(told, "full: p0 token 1 is")


def test_a_log_probability_that_is_missing_or_no_number_fails(told):
    """JSON has no nan: what is none is null, as what is missing."""
    rows = [each.tolist() for each in told.eager.rows["p0"]]
    rows[3][5] = None
    told.eager.rows["p0"] = [np.array(each, dtype=object) for each in rows]
    failed(told, "eager: p0 token 3: a log-probability is missing or not finite")


def test_a_missing_token_or_request_fails(told):
    told.eager.tokens["p0"].pop()
    failed(told, "eager: p0 has 3 tokens, not the 4 tokens ordered")
    told.eager.rows.pop("p0")
    failed(told, "eager: p0 has no output")


def test_a_vocabulary_of_another_size_fails(told):
    told.full.rows["p0"] = [np.append(each, -50.0) for each in told.full.rows["p0"]]
    failed(told, "full: p0: rows are not as long as the twin's")


def test_other_tokens_when_run_again_fail_unless_it_was_a_tie(told):
    rows = told.eager.rows["p1"]
    second = int(np.argsort(rows[0])[-2])
    told.eager.again = {"p1": [second, *told.eager.tokens["p1"][1:]]}
    verdict = failed(told, "eager: p1, run again (generation 1), sampled")
    assert verdict.rows[1].agreement == 1.0
    for name in ("reference", "eager", "full"):
        mine = getattr(told, name).rows["p1"][0]
        mine[second] = mine.max() - 1e-5
    assert judge(told).outcome is Outcome.PASS


def test_an_arm_of_graphs_that_never_replayed_is_not_compared(told):
    for counts in told.full.counts:
        counts["modes"] = {"NONE": 9}
    not_compared(told, "full: no step of rank 0 ran as FULL: 9 NONE")


def test_each_rank_must_replay(told):
    told.full.counts[1]["modes"] = {"PIECEWISE": 9}
    not_compared(told, "full: no step of rank 1 ran as FULL: 9 PIECEWISE")


def test_an_eager_arm_that_ran_graphs_is_not_compared(told):
    told.eager.counts[0]["modes"] = {"FULL": 1, "NONE": 8}
    not_compared(told, "eager: ran graphs though it is eager")


def test_ranks_that_are_not_there_are_told(told):
    told.eager.workers.pop()
    not_compared(told, "eager: 1 workers told of themselves, not 2")


def test_a_world_that_is_not_the_one_ordered_is_told(told):
    told.eager.workers[1].update(pcp_size=1, pcp_manager=False)
    not_compared(told, "eager: rank 1 runs with PCP size 1 (no PCP manager), not 2")


def test_a_dcp_size_that_was_dropped_is_told(told):
    told.eager.workers[1]["dcp_size"] = 2
    not_compared(told, "eager: rank 1 runs with DCP size 2, not 1")


def test_graphs_of_another_mode_are_not_the_arm_asked_for(told):
    told.full.workers[1]["cudagraph_mode"] = "FULL_AND_PIECEWISE"
    words = "full: rank 1 came up with cudagraph_mode FULL_AND_PIECEWISE, not FULL_DECODE_ONLY"
    not_compared(told, words)


def test_steps_past_the_pcp_manager_are_told(told):
    told.eager.counts[1]["partitioned"] = 8
    not_compared(told, "eager: rank 1 cut 8 of 9 steps")


def test_a_rank_without_a_step_is_told(told):
    told.eager.counts[1]["steps"] = 0
    not_compared(told, "eager: rank 1 executed no step")


def test_a_failure_outweighs_an_arm_that_was_not_run_as_asked(told):
    told.full.flip("p0", 1, 0.1)
    told.full.counts[0]["modes"] = {"NONE": 9}
    failed(told, "no step of rank 0 ran as FULL", "full: p0 token 1")


def test_a_planted_fault_never_passes(told):
    verdict = not_compared(told, "the planted fault kv-writer never acted", fault="kv-writer")
    assert len(verdict.reasons) == 2
    for arm in (told.eager, told.full):
        for counts in arm.counts:
            counts["faulted"] = 3
    not_compared(told, "acted in 6 steps and nothing was found of it", fault="kv-writer")


def test_a_planted_fault_that_shows_fails(told):
    for arm in (told.eager, told.full):
        arm.flip("p1", 0, 0.4)
        for counts in arm.counts:
            counts["faulted"] = 3
    failed(told, "eager: p1 token 0", fault="hidden-restore")
