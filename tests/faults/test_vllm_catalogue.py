"""The catalogue of `--target vllm` as data: readable without vLLM."""

import subprocess
import sys

import pytest

from pcpbench import cli
from pcpbench.faults import registry
from pcpbench.faults.classes import CLASSES
from pcpbench.faults.vllm import FAULTS
from pcpbench.session.faults_request import options_of

CODE = "import sys; from pcpbench import cli; cli.run(['faults', 'list', '--target', 'vllm'])"


def test_it_has_classes_of_every_part_of_a_step():
    classes = {fault.class_id for fault in FAULTS}
    assert classes >= {"K01", "K02", "K03", "K05", "K06", "K09", "K10", "K16", "K18", "K20", "K21",
                       "K22", "K24", "K26", "K34"}  # fmt: skip
    assert classes <= set(CLASSES)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.target for fault in FAULTS} == {"vllm"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_no_entry_is_run_where_vllms_own_dispatch_is_accused(fault):
    setting = fault.setting
    options_of(setting, "vllm").check()
    assert not fault.lacks(setting)
    if setting.pcp > 1 and setting.dcp == 1:
        assert setting.candidate == "piecewise"  # C10 looks at arms with FULL graphs


def test_the_two_targets_have_catalogues_of_their_own(capsys):
    ours, theirs = registry.catalogue().faults, registry.catalogue("vllm").faults
    assert "two-writers" in theirs
    assert "two-writers" not in ours
    assert ours["stale-block-rows"] is not theirs["stale-block-rows"]
    assert cli.run(["faults", "list", "--target", "vllm"]) == 0
    printed = capsys.readouterr().out
    assert "two-writers" in printed
    assert cli.run(["faults", "run", "--fault", "two-writers"]) == 2
    assert "which the catalogue lacks" in capsys.readouterr().err
    assert cli.run(["faults", "run", "--target", "vllm", "--fault", "two-writer"]) == 2
    said = capsys.readouterr().err
    assert "the catalogue of --target vllm lacks: did you mean two-writers" in said
    assert "`pcpbench faults list --target vllm` shows all" in said


@pytest.mark.parametrize("command", ["list", "run"])
def test_a_target_without_a_catalogue_is_refused(capsys, command):
    assert cli.run(["faults", command, "--target", "engine"]) == 2
    said = capsys.readouterr().err
    assert "--target is 'engine': faults can be injected into builtin or vllm." in said


def test_the_list_does_not_import_vllm():
    code = f"{CODE}; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
