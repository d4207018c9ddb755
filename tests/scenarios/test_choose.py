from pcpbench.scenarios.loader import choose_scenarios, load_scenarios, shipped_names


def names(*asked):
    return [scenario.name for scenario in choose_scenarios(asked)]


def test_without_a_name_the_core_scenarios_run():
    assert names() == [scenario.name for scenario in load_scenarios() if scenario.core]
    assert 3 <= len(names()) < len(shipped_names())


def test_all_is_every_shipped_one_and_whatever_is_named_besides(tmp_path):
    assert names("all") == shipped_names()
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "{name: mine, description: d, requests: [{prompt_len: 1, output_len: 1}]}", encoding="utf-8"
    )
    assert names(str(mine), "all", "s1-grow-shrink") == [*shipped_names(), "mine"]


def test_names_are_taken_as_they_come():
    assert names("s2-capture-edges", "s1-grow-shrink") == ["s2-capture-edges", "s1-grow-shrink"]
