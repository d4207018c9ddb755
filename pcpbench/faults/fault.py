"""What a fault is: a name, a class of FAULTS.md, an injection, and the findings that must follow.

Owns the interface that third parties implement. Knows no verdict and no session.

An injection is a context manager that is given a `Site`: it damages the engine's code or state on
entry and must leave both as they were, also when the run raised. `planted` wraps a plain function
into one: whatever the function changes through the site is put back.

    def stale_lengths(site):
        def faulty(pad, self, num_reqs, *rest):
            before = self.seq_lens.clone()
            pad(self, num_reqs, *rest)
            self.seq_lens[num_reqs:].copy_(before[num_reqs:])
            site.hit()

        site.wrap(InputBuffers, "pad", faulty)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from pcpbench.config import ALL2ALL_BACKENDS
from pcpbench.engine.engine import Engine
from pcpbench.engine.worker import Worker
from pcpbench.model.presets import model_shape

PARTITION_DRIFT: Final = "partition drift"
PADDING_DRIFT: Final = "padding drift"
MISSING: Final = object()


@dataclass(frozen=True)
class Setting:
    """Where a fault is run: a world, the arm to judge, capture sizes, draft tokens, a scenario.

    candidate: `full` or `full_and_piecewise`. capture_sizes: as on the command line, None for the
    default ones. checks: `full` for what only second replays or poisoned runs show. spec_tokens:
    draft tokens of a decode. microbatch: whether steps are cut into microbatches. model: a preset.
    dynamic_spec: whether decodes verify fewer drafts, as on the command line. dcp_backend: how
    partial attention is merged. expert_parallel, all2all_backend, draft_model: as on the command
    line.
    """

    pcp: int = 2
    tp: int = 1
    dcp: int = 1
    interleave: int = 1
    candidate: str = "full"
    capture_sizes: str | None = None
    scenario: str = "s1-grow-shrink"
    checks: str = "quick"
    spec_tokens: int = 0
    microbatch: bool = False
    model: str = "tiny"
    dynamic_spec: str = "off"
    dcp_backend: str = "ag_rs"
    expert_parallel: bool = False
    all2all_backend: str | None = None
    draft_model: str = "planned"

    @property
    def world(self) -> str:
        """The world in words, such as `pcp 2` or `tp 4 dcp 4 interleave 2 --check full`."""
        sizes = (("pcp", self.pcp), ("tp", self.tp), ("dcp", self.dcp))
        parts = [f"{name} {size}" for name, size in sizes if size > 1]
        if self.dcp > 1 and self.interleave > 1:
            parts.append(f"interleave {self.interleave}")
        parts += self._drafts()
        if self.microbatch:
            parts.append("microbatch")
        if self.model != "tiny":
            parts.append(self.model)
        if self.dcp_backend != "ag_rs":
            parts.append(f"dcp-backend {self.dcp_backend}")
        if self.expert_parallel:
            other = self.all2all_backend not in (None, ALL2ALL_BACKENDS[0])
            parts.append(f"expert-parallel {self.all2all_backend}" if other else "expert-parallel")
        if self.candidate != "full":
            parts.append(self.candidate)
        if self.checks != "quick":
            parts.append(f"--check {self.checks}")
        return " ".join(parts) or "one rank"

    def _drafts(self) -> Iterator[str]:
        if self.spec_tokens:
            yield f"spec-tokens {self.spec_tokens}"
        if self.dynamic_spec != "off":
            yield f"dynamic-spec {self.dynamic_spec}"
        if self.draft_model != "planned":
            yield f"draft-model {self.draft_model}"


class Site:
    """What an injection is given: the engines of all arms, and a log of what it changed.

    engines: arm label -> engine; empty for a fault that acts at capture, before any engine is
    built. api: the target's way to the code that it drives, such as the installed vLLM's classes;
    None for pcpbench's engine. num_hits: how often the injection said that it acted.
    """

    def __init__(self, engines: Mapping[str, Engine] | None = None, api: Any = None) -> None:
        self.engines: Mapping[str, Engine] = engines or {}
        self.api = api
        self.num_hits = 0
        self._undo: list[Callable[[], None]] = []

    def hit(self) -> None:
        """The injection has just made a difference."""
        self.num_hits += 1

    @property
    def replaying(self) -> list[Engine]:
        """Engines that hold captured graphs."""
        return [engine for engine in self.engines.values() if engine.graphs is not None]

    def workers(self, engines: list[Engine] | None = None) -> Iterator[Worker]:
        """Every rank of these engines (of all by default)."""
        for engine in self.engines.values() if engines is None else engines:
            yield from engine.workers

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance, class or module, until `restore`."""
        before = vars(owner).get(name, MISSING) if inspect.isclass(owner) else getattr(owner, name)

        def undo() -> None:
            if before is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)
        setattr(owner, name, value)

    def set_item(self, items: MutableSequence[Any], index: int, value: Any) -> None:
        """Replace one item of a list, until `restore`."""
        before = items[index]
        self._undo.append(lambda: items.__setitem__(index, before))
        items[index] = value

    def wrap(self, owner: Any, name: str, faulty: Callable[..., Any]) -> None:
        """Call faulty(original, ...) wherever owner.name was called, until `restore`.

        For a method the arguments after `original` begin with the instance; for a class method
        `original` is bound to its class already.
        """
        original, found = getattr(owner, name), inspect.getattr_static(owner, name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return faulty(original, *args, **kwargs)

        bound = isinstance(found, classmethod | staticmethod)
        self.set(owner, name, staticmethod(replacement) if bound else replacement)

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the fault is taken out, latest first."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Put back everything that was changed through this site."""
        while self._undo:
            self._undo.pop()()


Injection = Callable[[Site], AbstractContextManager[None]]


def planted(plant: Callable[[Site], None]) -> Injection:
    """An injection that runs `plant` on entry and undoes what it did through the site on exit."""

    @contextmanager
    def inject(site: Site) -> Iterator[None]:
        try:
            plant(site)
            yield
        finally:
            site.restore()

    return inject


@dataclass(frozen=True)
class Fault:
    """One entry of the catalogue.

    name: kebab-case. class_id: of FAULTS.md, such as `K01`. description: one sentence, what goes
    wrong. reports: public reports of the class, such as `vllm 38436`. contracts: ids (or
    PARTITION_DRIFT, PADDING_DRIFT) of which at least one must be found; empty for an entry that
    must not be reported. setting: the smallest world and the scenario that trigger it.
    min_pcp, min_tp, min_dcp, max_pcp, max_dcp, min_spec_tokens, needs_microbatch, needs_kv_groups,
    needs_dynamic_spec, needs_draft_model, needs_sparse, needs_dcp_backend, needs_experts: what a
    setting must have for the fault to exist; a model with several KV groups, draft tokens that vary
    in number, sparse attention. needs_backend: expert parallelism with this one.
    at_capture: injected before the engines are built and captured, into engines of its own;
    otherwise into engines that have captured soundly.
    leaves_marks: the engines cannot be used again although everything was put back.
    target: whose code it damages, `builtin` or `vllm`; each target has a catalogue of its own.
    """

    name: str
    class_id: str
    description: str
    reports: tuple[str, ...]
    contracts: frozenset[str]
    inject: Injection
    setting: Setting = field(default_factory=Setting)
    min_pcp: int = 1
    min_tp: int = 1
    min_dcp: int = 1
    max_pcp: int | None = None
    max_dcp: int | None = None
    min_spec_tokens: int = 0
    needs_microbatch: bool = False
    needs_kv_groups: bool = False
    needs_dynamic_spec: bool = False
    needs_draft_model: bool = False
    needs_sparse: bool = False
    needs_dcp_backend: str | None = None
    needs_experts: bool = False
    needs_backend: str | None = None
    at_capture: bool = False
    leaves_marks: bool = False
    target: str = "builtin"

    def lacks(self, setting: Setting) -> str:
        """What a setting lacks for this fault, "" when it has all."""
        if setting.pcp < self.min_pcp:
            return f"needs pcp {self.min_pcp} or more"
        if setting.tp < self.min_tp:
            return f"needs tp {self.min_tp} or more"
        if setting.dcp < self.min_dcp:
            return f"needs dcp {self.min_dcp} or more"
        if self.max_pcp is not None and setting.pcp > self.max_pcp:
            return f"needs pcp {self.max_pcp} or less"
        if self.max_dcp is not None and setting.dcp > self.max_dcp:
            return f"needs dcp {self.max_dcp} or less"
        if self.needs_microbatch and not setting.microbatch:
            return "needs --microbatch"
        lacks = self._lacks_drafts(setting) or self._lacks_attention(setting)
        return lacks or self._lacks_experts(setting)

    def _lacks_drafts(self, setting: Setting) -> str:
        if setting.spec_tokens < self.min_spec_tokens:
            return f"needs spec-tokens {self.min_spec_tokens} or more"
        if self.needs_dynamic_spec and setting.dynamic_spec == "off":
            return "needs --dynamic-spec"
        if self.needs_draft_model and setting.draft_model == "planned":
            return "needs --draft-model mtp"
        if setting.draft_model == "planned":
            return ""
        if setting.microbatch:
            return "has a draft model, which runs without --microbatch"
        several = len(model_shape(setting.model).kv_groups) > 1
        return "has a draft model, which needs a model with one KV group" if several else ""

    def _lacks_attention(self, setting: Setting) -> str:
        shape = model_shape(setting.model)
        if self.needs_kv_groups and len(shape.kv_groups) == 1:
            return "needs a model with several KV groups, such as tiny-swa"
        if self.needs_sparse and not shape.is_sparse:
            return "needs a model of sparse attention, such as tiny-sparse"
        if self.needs_dcp_backend not in (None, setting.dcp_backend):
            return f"needs dcp-backend {self.needs_dcp_backend}"
        return ""

    def _lacks_experts(self, setting: Setting) -> str:
        count, backend = model_shape(setting.model).n_routed_experts, None
        if setting.expert_parallel:
            backend = setting.all2all_backend or ALL2ALL_BACKENDS[0]
        if self.needs_experts and not count:
            return "needs a --model with experts"
        if self.needs_backend is not None and backend != self.needs_backend:
            return f"needs --expert-parallel with --all2all-backend {self.needs_backend}"
        if backend is not None and count % (setting.pcp * setting.tp):
            return f"needs a number of ranks that divides {count} experts"
        return ""
