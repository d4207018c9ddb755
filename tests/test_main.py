"""The program's first moments: a Ctrl-C before the command line has been imported."""

from __future__ import annotations

import sys

import pytest

from pcpbench.__main__ import main


def test_ctrl_c_during_imports_is_one_sentence_and_130(monkeypatch, capsys):
    class Interrupted:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "pcpbench.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "pcpbench.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 130
    assert capsys.readouterr().err == "pcpbench: interrupted before anything was started.\n"
