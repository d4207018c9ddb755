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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'rich'"), "No module named 'rich'"),
        (ImportError("cannot import name 'TyperException' from 'typer'"), "TyperException"),
        (SyntaxError("invalid\nsyntax"), "SyntaxError: invalid syntax"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_imported_is_one_sentence_and_3(monkeypatch, capsys, error, said):
    class Missing:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "pcpbench.cli":
                raise error

    monkeypatch.delitem(sys.modules, "pcpbench.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 3
    told = capsys.readouterr().err
    assert told.startswith("pcpbench: it cannot be loaded (")
    assert said in told
    assert told.count("\n") == 1
