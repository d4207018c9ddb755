"""The catalogue as data, its injections as good guests, and a few of them end to end."""

import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from pcpbench import cli
from pcpbench.checks.contracts import CONTRACTS
from pcpbench.faults import registry
from pcpbench.faults.classes import CLASSES
from pcpbench.faults.entries import reason_against
from pcpbench.faults.fault import PADDING_DRIFT, PARTITION_DRIFT, Setting, Site, planted
from pcpbench.records import CONTRACT_IDS


def test_the_catalogue_covers_every_class_that_the_engine_can_have():
    faults = registry.all_faults().values()
    assert len(faults) >= 40
    assert {fault.class_id for fault in faults} == set(CLASSES)


def test_every_fault_expects_something_that_exists_except_what_is_no_fault():
    known = {c.id for c in CONTRACTS} | {"C9", "C13", "C14", "C15", "C16", "C18", "C19"}
    known |= {PARTITION_DRIFT, PADDING_DRIFT}
    for fault in registry.all_faults().values():
        assert set(fault.contracts) <= known, fault.name
        assert bool(fault.contracts) != fault.description.startswith("Not a fault:"), fault.name
        assert fault.description.endswith("."), fault.name


class Owner:
    value = 1

    def method(self):
        return "sound"

    @classmethod
    def make(cls):
        return cls.__name__


class Heir(Owner):
    pass


def test_whatever_a_fault_changes_is_put_back_even_after_an_error():
    thing, items = Heir(), [1, 2]
    undone = []

    def plant(site):
        site.set(thing, "value", 5)
        site.set_item(items, 1, 9)
        site.wrap(Heir, "method", lambda original, self: original(self) + " no more")
        site.wrap(Owner, "make", lambda original: original() + "!")
        site.on_restore(lambda: undone.append(True))
        assert (thing.value, items, thing.method(), Owner.make()) == (
            5, [1, 9], "sound no more", "Owner!",
        )  # fmt: skip
        raise ValueError("the run broke")

    with pytest.raises(ValueError, match="the run broke"), planted(plant)(Site()):
        pass
    assert (thing.value, items, thing.method(), Owner.make()) == (1, [1, 2], "sound", "Owner")
    assert "method" not in vars(Heir)
    assert undone == [True]


def entry_point(monkeypatch, loaded):
    point = SimpleNamespace(
        name="theirs",
        value="theirs:FAULTS",
        load=lambda: loaded,
        dist=SimpleNamespace(name="their-faults"),
    )
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [point] if group == registry.GROUP else []
    )


def test_an_installed_package_can_bring_faults(monkeypatch):
    first = next(iter(registry.all_faults().values()))
    theirs = type(first)(**{**vars(first), "name": "of-a-third-party"})
    entry_point(monkeypatch, [theirs])
    assert registry.all_faults()["of-a-third-party"] is theirs
    assert registry.choose_faults(["of-a-third-party"]) == [theirs]


def good(**changes):
    first = next(iter(registry.all_faults().values()))
    return type(first)(**{**vars(first), "name": "of-theirs", **changes})


BAD_ENTRIES = {
    "no fault": ("not a fault", "theirs", "it brings 'not a fault'"),
    "taken": ({"name": "stale-block-rows"}, "stale-block-rows", "there is a fault of this name"),
    "name": ({"name": "Of Theirs"}, "Of Theirs", "name is 'Of Theirs'"),
    "no name": ({"name": None}, "theirs", "name is None"),
    "contract": ({"contracts": frozenset({"C1", "C99"})}, "of-theirs", "contracts hold 'C99'"),
    "contracts": ({"contracts": "C1"}, "of-theirs", "contracts are 'C1'"),
    "inject": ({"inject": 3}, "of-theirs", "inject is 3"),
    "pcp": ({"setting": Setting(pcp=0)}, "of-theirs", "setting.pcp is 0"),
    "arm": ({"setting": Setting(candidate="eager")}, "of-theirs", "setting.candidate is 'eager'"),
    "scenario": ({"setting": Setting(scenario="zzz")}, "of-theirs", "scenario 'zzz'"),
    "setting": ({"setting": {"pcp": 2}}, "of-theirs", "setting is {'pcp': 2}"),
    "target": ({"target": "trt"}, "of-theirs", "target is 'trt'"),
    "text": ({"description": ""}, "of-theirs", "description is ''"),
    "least": ({"min_pcp": "2"}, "of-theirs", "min_pcp is '2'"),
}


@pytest.mark.parametrize(("entry", "name", "said"), BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_an_entry_that_cannot_be_used_is_named_and_touches_nobody_else(
    monkeypatch, capsys, entry, name, said
):
    bad = good(**entry) if isinstance(entry, dict) else entry
    entry_point(monkeypatch, [bad, good(name="a-good-one")])
    known = registry.catalogue()
    assert "a-good-one" in known.faults
    assert known.faults.keys() >= registry.SHIPPED_NAMES
    (unusable,) = known.unusable
    assert (unusable.name, unusable.source) == (name, "package their-faults, entry point 'theirs'")
    assert said in unusable.reason
    assert registry.choose_unusable(["stale-padded-slots"]) == []
    assert registry.choose_unusable([name]) == [unusable]
    assert cli.run(["faults", "list"]) == 0
    assert name in capsys.readouterr().out


def test_an_entry_point_that_raises_is_one_that_cannot_be_used(monkeypatch):
    def load():
        raise ImportError("their own mistake")

    point = SimpleNamespace(name="theirs", value="theirs:FAULTS", load=load)
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [point] if group == registry.GROUP else []
    )
    (unusable,) = registry.catalogue().unusable
    assert unusable.told == (
        "entry point 'theirs': theirs:FAULTS cannot be loaded (ImportError: their own mistake)"
    )


def test_every_shipped_fault_would_be_taken_from_anybody():
    every = [fault for own in registry.SHIPPED_FOR.values() for fault in own]
    assert [reason_against(fault) for fault in every if reason_against(fault)] == []


def test_the_contracts_that_there_are_are_those_of_the_docs():
    docs = Path(__file__).parents[2] / "docs" / "contracts.md"
    rows = re.findall(r"^\| (C[0-9]+) \|", docs.read_text(encoding="utf-8"), re.MULTILINE)
    assert tuple(rows) == CONTRACT_IDS


def test_an_unknown_fault_is_refused(capsys):
    assert cli.run(["faults", "run", "--fault", "no-such-thing"]) == 2
    assert "--fault is 'no-such-thing'" in capsys.readouterr().err


def test_the_list_shows_name_class_and_contracts(capsys):
    assert cli.run(["faults", "list"]) == 0
    printed = capsys.readouterr().out
    assert "stale-padded-seq-lens" in printed
    assert "K01" in printed
