"""The first difference on a console: place, values, plan, KV, replay; narrow and wide."""

import json

import pytest
from msgspec.structs import replace

from pcpbench.divergence import Accusation, Divergence, KvOrigin, TensorDifference
from pcpbench.plan import ScheduledRequest, StepPlan
from pcpbench.report.compare_view import print_compare
from pcpbench.report.divergence_view import (
    ReproResult,
    difference_text,
    kv_text,
    plan_text,
    print_repro,
    print_repro_json,
    repro_text,
)
from pcpbench.report.json_out import compare_json

ACCUSATION = Accusation(
    finding="drift", kind="capture", arm="full", twin="eager_padded[full]", step=7, last_step=7,
    rank=1, layer=None, tensor="logits", contract="C13", message="311 of 4096 values differ",
)  # fmt: skip
TAP = TensorDifference(
    step=7, rank=1, layer=3, op="mla_attention", tensor="out", against="eager_padded[full]",
    num_elements=4096, num_mismatched=311, first_index=(2, 0, 5), max_abs=0.125,
    place="request r3, position 17", found=("0.5",) * 8, expected=("0.25",) * 8,
)  # fmt: skip
KV = KvOrigin(
    what="non-finite", phase="dummy", step=6, rank=0, layer=2, slot=35, block=2, req_id=None
)
STEP = StepPlan(
    index=7,
    scheduled=tuple(
        ScheduledRequest(
            req_id=f"r{i}", num_scheduled_tokens=1 + 4 * (i == 0), num_computed_tokens=17 * (i > 0),
            prefill_len=5, prompt_len=5,
        )
        for i in range(8)
    ),
)  # fmt: skip
FOUND = Divergence(
    scenario="s3-idle-and-reuse", accusation=ACCUSATION, reproduced="with taps", tap=TAP, kv=KV,
    plan=STEP, ran_as="FULL[reqs=4,tokens=4]", twin_ran_as="eager, padded to FULL[reqs=4,tokens=4]",
    fault="some-fault", bundle="results/run/divergence",
)  # fmt: skip
NEVER = replace(FOUND, reproduced="no", tap=None, fault="")


def test_a_difference_is_one_sentence():
    assert difference_text(TAP) == (
        "step 7, rank 1, layer 3, mla_attention -> out: 311 of 4,096 values differ from "
        "eager_padded[full], max abs 0.125; first at [2, 0, 5] (request r3, position 17)"
    )
    bad = replace(TAP, num_non_finite=3, max_abs=None)
    assert "full], 3 not finite; first" in difference_text(bad)
    assert "311 of 4,096 values are not finite; first" in difference_text(replace(bad, expected=()))
    moved = "rank0.seq_lens was captured at 0x1000 and is gone"
    said = difference_text(replace(TAP, op="", tensor="address", message=moved))
    assert said.endswith(f"{moved} (addresses are those of a second run, of the two arms alone)")
    told = replace(TAP, op="", layer=None, tensor="seq_lens", message="seq_lens[3] is 17")
    assert difference_text(told) == "step 7, rank 1: seq_lens[3] is 17"


def test_kv_and_plan_in_words():
    assert kv_text(KV) == (
        "dummy, step 6, rank 0, layer 2, slot 35 (block 2; no request's): holds non-finite values"
    )
    assert plan_text(STEP) == (
        "step 7: r0 prefills 5 tokens at 0; r1 decodes 1 token at 17; r2 decodes 1 token at 17; r3 "
        "decodes 1 token at 17; r4 decodes 1 token at 17; r5 decodes 1 token at 17; and 2 requests "
        "more"
    )
    assert plan_text(StepPlan(index=3, scheduled=(), idle=True)) == "step 3: idle"


@pytest.mark.parametrize("width", [80, 140])
def test_the_report_shows_it_once_before_what_follows(make, width):
    result = replace(make.compare(make.failed(), make.passed()), divergence=FOUND)
    result = replace(result, settings={**result.settings, "inject": "some-fault"})
    printed = make.render(print_compare, result, width=width)
    lines = printed.splitlines()
    assert all(len(line) <= width for line in lines)
    assert any("Injected" in line and "some-fault" in line for line in lines[:4])
    flat = " ".join(printed.split())
    assert flat.count("First difference") == 1
    assert "layer 3, mla_attention -> out" in flat
    assert "found 0.5, 0.5, 0.5, 0.5, ..." in flat
    assert "pcpbench repro results/run/divergence" in flat
    document = json.loads(compare_json(result))
    assert document["divergence"]["tap"]["op"] == "mla_attention"
    assert document["divergence"]["plan"]["index"] == 7


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recorded": NEVER}, "it never showed in a run of the two arms alone"),
        ({"fault": "some-fault"}, "the planted fault some-fault never acted in this run"),
    ],
)
def test_a_repro_that_says_nothing_is_no_pass(make, capsys, changes, said):
    result = ReproResult(**{"bundle": "b", "recorded": FOUND, "found": NEVER, **changes})
    assert result.exit_code == 3
    printed = " ".join(make.render(print_repro, result, width=100).split())
    assert printed.startswith("NOT COMPARED")
    assert said in printed
    print_repro_json(result)
    document = json.loads(capsys.readouterr().out)
    assert (document["exit_code"], document["diverges"]) == (3, False)
    acted = replace(result, fault="some-fault", num_hits=1, recorded=FOUND)
    assert acted.exit_code == 0
    again = replace(result, found=replace(FOUND, reproduced="without taps"))
    assert again.exit_code == 1


@pytest.mark.parametrize(
    ("found", "exit_code", "said"),
    [
        (FOUND, 1, "it diverges again, at the same place."),
        (replace(FOUND, tap=replace(TAP, layer=0)), 1, "at another place than recorded."),
        (replace(FOUND, reproduced="without taps", tap=None), 1, "at another place"),
        (replace(FOUND, reproduced="no", tap=None), 0, "it does not diverge any more."),
        (None, 1, "it broke off: no."),
    ],
)
def test_a_repro_says_what_came_of_it(make, capsys, found, exit_code, said):
    result = ReproResult(bundle="b", recorded=FOUND, found=found, cause="no.", changes=("torch",))
    assert result.exit_code == exit_code
    assert said in repro_text(result)
    printed = " ".join(make.render(print_repro, result, width=100).split())
    assert ("PASS" in printed) == (exit_code == 0)
    assert "some-fault" in printed
    assert "Changed since torch" in printed
    print_repro_json(result)
    document = json.loads(capsys.readouterr().out)
    assert (document["exit_code"], document["diverges"]) == (exit_code, exit_code == 1)
