"""The dispatch mode that sees every op while the captured function runs, and sorts it.

Functional ops run, on whatever their inputs hold, and their results move into pool blocks. Ops
that write outside memory do not run. Custom operators are device kernels: opaque, declared by
their schema, their Python body unseen. Knows the kinds of op; leaves to `lowering` how each is
replayed, to `refusals` what cannot be, and to `tape` the bookkeeping.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from pcpbench.device.host_graph import torch_private
from pcpbench.device.host_graph.lowering import Lowering
from pcpbench.device.host_graph.refusals import (
    HostReadGuard,
    check_operator,
    check_result,
    refuse_higher_order,
    refuse_moving,
)
from pcpbench.device.host_graph.schema import Facts, SchemaBook, tensors_in
from pcpbench.device.host_graph.source import calling_source
from pcpbench.device.host_graph.tape import Tape

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
_LIKE_CONSTANTS = frozenset(
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Recorder(torch_private.QuietDispatchMode):  # type: ignore[no-untyped-call]
    """Records one capture on a tape. `hoists` allows constants to be made once, not every replay.

    generators: every random generator that an op was given, with its state before the op.
    """

    supports_higher_order_operators = True  # so that they come here, to be refused by name

    def __init__(
        self,
        tape: Tape,
        schemas: SchemaBook,
        lowering: Lowering,
        guard: HostReadGuard,
        hoists: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._tape = tape
        self._schemas = schemas
        self._lowering = lowering
        self._guard = guard
        self._hoists = hoists

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Record one op and return what the captured function is to see."""
        kwargs = kwargs or {}
        if any(each not in _PLAIN_TYPES for each in types):
            return NotImplemented
        if not isinstance(func, OpOverload):
            raise refuse_higher_order(func, args)
        facts = self._schemas.facts(func)
        if facts.namespace == "profiler":
            return func(*args, **kwargs)
        check_operator(facts, args, kwargs, self._guard, self._tape.is_on_host)
        if facts.is_composite:
            with self:
                return torch_private.decompose(func, args, kwargs)
        self._remember_generators([*args, *kwargs.values()])
        return self._record(facts, args, kwargs)

    def _record(self, facts: Facts, args: Args, kwargs: Kwargs) -> Any:
        if facts.base == "lift_fresh":
            return self._placed(self._constant(facts, args[0].clone()), facts, ())
        if facts.base == "detach_":
            return args[0]
        if facts.changes_metadata:
            if self._tape.is_external(args[0]):
                raise refuse_moving(facts, args, self._guard)
            return facts.func(*args, **kwargs)
        if facts.written:
            return self._write(facts, args, kwargs)
        if facts.num_returns == 0:
            self._add_in_place(facts, args, kwargs)
            return None
        return self._compute(facts, args, kwargs)

    def _compute(self, facts: Facts, args: Args, kwargs: Kwargs) -> Any:
        """An op that writes nothing that exists."""
        result = self._run(facts, args, kwargs)
        check_result(facts, args, result, self._guard)
        if facts.is_custom:
            return self._move_in(facts, args, kwargs, result)
        tensors = tuple(tensors_in([args, kwargs]))
        if facts.base in _UNWRITTEN:
            moved, keeps, _ = self._tape.move_in(result, (), exclusive=False)
            for keep in keeps:
                keep.block.memory.fill(0)
            return self._placed(moved, facts, tensors)
        constant = not (tensors or facts.is_random) or facts.base in _LIKE_CONSTANTS
        if self._hoists and constant and isinstance(result, torch.Tensor):
            moved = self._constant(facts, result)
        else:
            moved = self._move_in(facts, args, kwargs, result)
        return self._placed(moved, facts, tensors)

    def _run(self, facts: Facts, args: Args, kwargs: Kwargs) -> Any:
        """What an op gives now. One whose sizes must fit its values is given some that do."""
        if facts.name != "aten.repeat_interleave.Tensor" or not args[0].numel():
            return facts.func(*args, **kwargs)
        fitting = torch.zeros_like(args[0])
        fitting.view(-1)[0] = kwargs["output_size"]
        return facts.func(fitting, **kwargs)

    def _placed(self, moved: Any, facts: Facts, inputs: tuple[torch.Tensor, ...]) -> Any:
        """`moved`, known as the host's from here on if a device would have no part in it."""
        from_host = not facts.is_random and all(map(self._tape.is_on_host, inputs))
        if from_host and self._guard.makes_on_host:
            for tensor in tensors_in(moved):
                self._tape.made_on_host(tensor)
        return moved

    def _write(self, facts: Facts, args: Args, kwargs: Kwargs) -> Any:
        """An op that writes some of its arguments, and perhaps returns something new as well."""
        named = facts.bind(args, kwargs)
        names = [name for name in facts.arg_names if name in facts.written and name in named]
        written = {name: named[name] for name in names}
        if facts.returns_fresh:
            scratch = named | {name: _copied(value) for name, value in written.items()}
            result = facts.func(**scratch)
            return facts.with_aliases(self._move_in(facts, args, kwargs, result), named)
        outside = any(map(self._tape.is_external, tensors_in(written)))
        if facts.is_custom:
            for tensor in filter(self._tape.is_mine, tensors_in(written)):
                tensor.zero_()
        elif facts.out_names:
            self._run_on_scratch(facts, named, written, outside)
        elif not outside:
            facts.func(*args, **kwargs)
        self._add_in_place(facts, args, kwargs)
        return facts.aliases(named)

    def _run_on_scratch(self, facts: Facts, named: Kwargs, written: Kwargs, outside: bool) -> None:
        """Run an `out=` call on copies: it must not resize, and outside memory is not written."""
        scratch = {name: _copied(value) for name, value in written.items()}
        facts.func(**(named | scratch))
        pairs = list(zip(tensors_in(written), tensors_in(scratch), strict=True))
        if any(real.shape != copy.shape for real, copy in pairs):
            raise refuse_moving(facts, tuple(written.values()), self._guard)
        if not outside:
            for real, copy in pairs:
                real.copy_(copy)

    def _constant(self, facts: Facts, value: torch.Tensor) -> torch.Tensor:
        """A tensor that holds the same values at every replay unless something writes it."""
        moved, keeps, values = self._tape.move_in(value, (), exclusive=True)
        if keeps:
            statements = self._lowering.constant(keeps, values)
            source = calling_source().text
            self._tape.add(facts, {}, source, statements, keeps, constant=keeps[0].block)
        return moved  # type: ignore[no-any-return]

    def _move_in(self, facts: Facts, args: Args, kwargs: Kwargs, result: Any) -> Any:
        """Give fresh results their blocks and record how a replay fills them."""
        moved, keeps, values = self._tape.move_in(result, [args, kwargs], exclusive=False)
        if keeps or facts.is_custom:
            baked = self._tape.baked(args), self._tape.baked(kwargs)
            statements = self._lowering.functional(facts, *baked, keeps, values)
            named = facts.bind(args, kwargs)
            self._tape.add(facts, named, calling_source().text, statements, keeps)
        return moved

    def _add_in_place(self, facts: Facts, args: Args, kwargs: Kwargs) -> None:
        baked = self._tape.baked(args), self._tape.baked(kwargs)
        statements = self._lowering.mutation(facts, *baked)
        self._tape.add(facts, facts.bind(args, kwargs), calling_source().text, statements)

    def _remember_generators(self, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Generator):
                self.generators.append((value, value.get_state()))


def _copied(value: Any) -> Any:
    """Copies of the tensors in an argument, with their strides."""
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.preserve_format)
    return [_copied(each) for each in value] if isinstance(value, (list, tuple)) else value
