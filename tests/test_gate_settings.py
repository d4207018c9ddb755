"""Where a gate's settings come from, which of them wins, and what is refused."""

import pytest

from pcpbench.errors import UsageError
from pcpbench.gate_defaults import DEFAULT_MAX_TIME_S
from pcpbench.gate_settings import GateOptions, resolve_settings


@pytest.fixture
def project(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pcpbench]\n"
        'fail-on = ["tpot:5%", "launch:10%"]\n'
        'on-undecided = "fail"\n'
        "max_time = 30\n"
        'accept = [{rule = "tpot:9%", until = 2027-01-31, reason = "known"}]\n',
        encoding="utf-8",
    )
    (tmp_path / "gate.toml").write_text(
        'fail-on = ["launch:20%"]\nmax-time = 40.5\n', encoding="utf-8"
    )
    return tmp_path


def by_key(settings):
    return {rule.name: rule.text for rule in settings.rules}


def test_nothing_said_means_the_defaults(tmp_path):
    (tmp_path / ".git").mkdir()
    settings = resolve_settings(GateOptions(), tmp_path)
    assert (settings.on_undecided, settings.max_time_s) == ("warn", DEFAULT_MAX_TIME_S)
    assert settings.sources == {}


def test_command_line_over_file_over_pyproject_over_default(project):
    options = GateOptions(
        config=project / "gate.toml", on_undecided="pass", fail_on=("itl:3%",), processes=9
    )
    settings = resolve_settings(options, project)
    rules = by_key(settings)
    assert (rules["tpot"], rules["launch"], rules["itl"]) == ("tpot:5%", "launch:20%", "itl:3%")
    assert rules["drift"] == "drift:0"
    assert settings.on_undecided == "pass"
    assert settings.max_time_s == 40.5
    assert settings.processes == 9
    assert settings.sources == {
        "on-undecided": "command line",
        "max-time": f"--config {project / 'gate.toml'}",
        "processes": "command line",
    }
    assert settings.accept[0].reason == "known"
    assert settings.shown()["accept"][0]["until"] == "2027-01-31"


def test_a_pyproject_is_found_above_but_not_outside_the_repository(project, tmp_path):
    inside = project / "a" / "b"
    inside.mkdir(parents=True)
    assert by_key(resolve_settings(GateOptions(), inside))["tpot"] == "tpot:5%"
    (inside / ".git").mkdir()
    assert by_key(resolve_settings(GateOptions(), inside))["tpot"] == "tpot:2.5%"


def test_an_acceptance_in_words(tmp_path):
    (tmp_path / ".git").mkdir()
    options = GateOptions(accept=("tpot:8% until 2027-01-31 because the new kernel waits",))
    (accepted,) = resolve_settings(options, tmp_path).accept
    assert (accepted.rule.text, accepted.reason) == ("tpot:8%", "the new kernel waits")
    with pytest.raises(UsageError, match="write it as"):
        resolve_settings(GateOptions(accept=("tpot:8%",)), tmp_path)


def test_what_the_command_line_accepts_replaces_what_pyproject_does(project):
    narrow = GateOptions(accept=("tpot:6% until 2027-01-31 because of today's work",))
    assert [a.rule.text for a in resolve_settings(narrow, project).accept] == ["tpot:6%"]
    other = GateOptions(accept=("launch:30% until 2027-01-31 because it waits",))
    texts = [a.rule.text for a in resolve_settings(other, project).accept]
    assert texts == ["tpot:9%", "launch:30%"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tool.pcpbench]\nfailon = []\n", "no setting 'failon'"),
        ("[tool.pcpbench]\nfail-on = [5]\n", "list of rules"),
        ('[tool.pcpbench]\nfail-on = ["tpot:nan%"]\n', "no finite number"),
        ('[tool.pcpbench]\non-undecided = "maybe"\n', "fail, warn, pass"),
        ("[tool.pcpbench]\nmax-time = nan\n", "max-time is nan"),
        ("[tool.pcpbench]\nmax-time = inf\n", "max-time is inf"),
        ("[tool.pcpbench]\nmax-time = true\n", "max-time is True"),
        ("[tool.pcpbench]\nmax-time = 0\n", "above 0"),
        ("[tool.pcpbench]\nprocesses = 3\n", "use 4 to"),
        ("[tool.pcpbench]\nprocesses = 6.5\n", "use a whole number"),
        ('[tool.pcpbench]\naccept = ["tpot:8%"]\n', "write tables"),
        ("[tool]\npcpbench = 3\n", "no table"),
        ("[tool.pcpbench]\nmax-time = 1\nmax_time = 2\n", "max_time in two spellings"),
        ("[tool.pcpbench\n", "cannot be read as TOML"),
        (f"[tool.pcpbench]\nmax-time = {'9' * 5000}\n", "cannot be read as TOML"),
        (f"[tool.pcpbench]\nmax-time = 0x{'f' * 5000}\n", "cannot be read as TOML"),
        (f"[tool.pcpbench]\naccept = {'[' * 50_000}\n", "cannot be read as TOML"),
    ],
    ids=lambda text: text[:50],
)
def test_bad_settings_are_refused_by_name(tmp_path, text, told):
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=told):
        resolve_settings(GateOptions(), tmp_path)


def test_a_bad_option_is_named_as_it_was_typed(tmp_path):
    for options, told in (
        (GateOptions(processes=2), "--processes is 2: use 4 to"),
        (GateOptions(max_time_s=-1.0), "--max-time is -1.0: use seconds"),
        (GateOptions(on_undecided="maybe"), "--on-undecided is 'maybe': use one of"),
    ):
        with pytest.raises(UsageError, match=f"^{told}"):
            resolve_settings(options, tmp_path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    (tmp_path / ".git").mkdir()
    with pytest.raises(UsageError, match="is no file"):
        resolve_settings(GateOptions(config=tmp_path / "none.toml"), tmp_path)


def test_another_tool_s_pyproject_changes_nothing(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n", encoding="utf-8")
    assert by_key(resolve_settings(GateOptions(), tmp_path))["tpot"] == "tpot:2.5%"
