"""The options of an engine: on every command that builds one, with the defaults of an engine."""

from typing import Annotated

import msgspec
import typer
import typer.main

from pcpbench import cli
from pcpbench.cli_engine_options import ENGINE_OPTIONS, engine_options
from pcpbench.engine_options import EngineOptions


def test_every_setting_of_an_engine_has_an_option_with_its_default():
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineOptions)}
    assert {name: option.default for name, option in ENGINE_OPTIONS.items()} == defaults


def told(left_out, arguments):
    """What a command is called with."""
    app = typer.Typer()
    calls = []

    @app.command()
    @engine_options(*left_out)
    def command(
        name: Annotated[str, typer.Argument()],
        *,
        options: EngineOptions,
        loud: Annotated[bool, typer.Option("--loud")] = False,
    ) -> None:
        calls.append((name, options, loud))

    app(arguments.split(), standalone_mode=False)
    return calls.pop()


def test_a_command_gets_its_own_parameters_and_one_engine():
    assert told((), "n --loud") == ("n", EngineOptions(), True)
    assert told((), "--pcp 4 n --capture-sizes 1,2 --microbatch --target vllm") == (
        "n",
        EngineOptions(pcp=4, capture_sizes="1,2", microbatch=True, target="vllm"),
        False,
    )


def test_what_is_left_out_is_no_option():
    assert told(("target",), "n --seed 3")[1] == EngineOptions(seed=3)
    commands = typer.main.get_command(cli.app).commands
    names = {name: {p.name for p in commands[name].params} for name in ("compare", "modes")}
    assert set(ENGINE_OPTIONS) <= names["compare"]
    assert set(ENGINE_OPTIONS) - names["modes"] == {"target"}
