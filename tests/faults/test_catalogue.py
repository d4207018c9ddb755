"""The catalogue as data, its injections as good guests, and a few of them end to end."""

from importlib import metadata
from types import SimpleNamespace

import pytest

from pcpbench import cli
from pcpbench.checks.contracts import CONTRACTS
from pcpbench.errors import UsageError
from pcpbench.faults import registry
from pcpbench.faults.classes import CLASSES
from pcpbench.faults.fault import PADDING_DRIFT, PARTITION_DRIFT, Site, planted


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
    point = SimpleNamespace(name="theirs", value="theirs:FAULTS", load=lambda: loaded)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])


def test_an_installed_package_can_bring_faults(monkeypatch):
    first = next(iter(registry.all_faults().values()))
    theirs = type(first)(**{**vars(first), "name": "of-a-third-party"})
    entry_point(monkeypatch, [theirs])
    assert registry.all_faults()["of-a-third-party"] is theirs
    assert registry.choose_faults(["of-a-third-party"]) == [theirs]


def test_a_third_party_that_brings_no_fault_or_a_taken_name_is_named(monkeypatch):
    first = next(iter(registry.all_faults().values()))
    entry_point(monkeypatch, "not a fault")
    with pytest.raises(UsageError, match="'theirs'"):
        registry.all_faults()
    entry_point(monkeypatch, first)
    with pytest.raises(UsageError, match=first.name):
        registry.all_faults()


def test_an_unknown_fault_is_refused(capsys):
    assert cli.run(["faults", "run", "--fault", "no-such-thing"]) == 2
    assert "--fault is 'no-such-thing'" in capsys.readouterr().err


def test_the_list_shows_name_class_and_contracts(capsys):
    assert cli.run(["faults", "list"]) == 0
    printed = capsys.readouterr().out
    assert "stale-padded-seq-lens" in printed
    assert "K01" in printed
