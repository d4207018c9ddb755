"""The options of an engine: spelled once, for every command that builds one.

Owns their order, their defaults, and the decorator that puts them on a command.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_type_hints

from pcpbench.cli_options import (
    All2AllBackend,
    Backend,
    CaptureSizes,
    Dcp,
    DcpBackend,
    Device,
    DraftModel,
    Dtype,
    DynamicSpec,
    ExpertParallel,
    Interleave,
    Launcher,
    MaxNumSeqs,
    Microbatch,
    Model,
    Pcp,
    Seed,
    SpecTokens,
    Target,
    Tp,
)

if TYPE_CHECKING:
    from pcpbench.engine_options import EngineOptions

OPTIONS: Final = "options"
"""The parameter of a command that stands for all of them."""


class EngineOption(NamedTuple):
    """One field of EngineOptions on the command line; its default is repeated here, since
    importing that class is what `--help` need not wait for."""

    annotation: Any
    default: object


ENGINE_OPTIONS: Final = {
    "pcp": EngineOption(Pcp, 2),
    "dcp": EngineOption(Dcp, 1),
    "tp": EngineOption(Tp, 1),
    "interleave": EngineOption(Interleave, 1),
    "dcp_backend": EngineOption(DcpBackend, "ag_rs"),
    "model": EngineOption(Model, "auto"),
    "dtype": EngineOption(Dtype, "float32"),
    "capture_sizes": EngineOption(CaptureSizes, None),
    "max_num_seqs": EngineOption(MaxNumSeqs, None),
    "spec_tokens": EngineOption(SpecTokens, 0),
    "dynamic_spec": EngineOption(DynamicSpec, "off"),
    "draft_model": EngineOption(DraftModel, "planned"),
    "microbatch": EngineOption(Microbatch, False),
    "expert_parallel": EngineOption(ExpertParallel, False),
    "all2all_backend": EngineOption(All2AllBackend, None),
    "device": EngineOption(Device, "auto"),
    "backend": EngineOption(Backend, "auto"),
    "launcher": EngineOption(Launcher, "inproc"),
    "seed": EngineOption(Seed, 0),
    "target": EngineOption(Target, "builtin"),
}

Command = Callable[..., None]


def engine_options(*left_out: str) -> Callable[[Command], Command]:
    """Put one option for each setting of an engine in the place of a command's `options`.

    The command is called with all of them as one EngineOptions, of which those that are left out
    have their defaults.
    """
    chosen = {name: each for name, each in ENGINE_OPTIONS.items() if name not in left_out}

    def give(command: Command) -> Command:
        @functools.wraps(command)
        def called(**values: Any) -> None:
            from pcpbench.engine_options import EngineOptions

            options: EngineOptions = EngineOptions(**{name: values.pop(name) for name in chosen})
            command(**values, options=options)

        # Their class is not imported yet; everything else is what the command's own module means.
        hints = get_type_hints(command, localns={"EngineOptions": object}, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name == OPTIONS:
                parameters += [
                    parameter.replace(name=setting, default=default, annotation=annotation)
                    for setting, (annotation, default) in chosen.items()
                ]
            else:
                parameters.append(parameter.replace(annotation=hints[name]))
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return give
