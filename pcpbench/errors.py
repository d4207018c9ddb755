"""What can go wrong, and the exit code each kind ends with. Knows nothing of why.

    PcpbenchError
    |- UsageError            bad input: a setting, a file, a combination          exit 2
    |  `- ScenarioError      a scenario file that cannot be used                  exit 2
    |- CannotMeasure         this machine or run cannot give an answer            exit 3
    |  |- DeviceMissing      no such device, or its graph backend is not there    exit 3
    |  |- NothingCompared    no steps, no common outputs, an arm that never ran   exit 3
    |  |- NoMemory           the machine has no memory left                     exit 3
    |  `- NothingToDamage    a fault of what the code at hand does not have      exit 3
    `- MeasuredFailure       the thing measured broke its contract                exit 1
       |- EngineError        the engine raised something of its own             exit 1
       |- CaptureError       the code under capture did what a graph cannot hold  exit 1
       |- CollectiveMismatch ranks of a group met with different calls            exit 1
       |- DispatchMismatch   ranks chose different descriptors                    exit 1
       `- BatchRejected      the engine refused a batch it should have taken      exit 1

A message is one sentence that names the setting, its value and what would work.
"""

from __future__ import annotations


class PcpbenchError(Exception):
    """Base of every error that pcpbench raises on purpose."""

    exit_code = 3


class UsageError(PcpbenchError):
    """Bad input; nothing was run and nothing was written."""

    exit_code = 2


class ScenarioError(UsageError):
    """A scenario file that is missing, broken or asks for the impossible."""


class CannotMeasure(PcpbenchError):
    """The question is legal, but this machine or this run cannot answer it."""

    exit_code = 3


class DeviceMissing(CannotMeasure):
    """The device asked for is not on this machine."""


class NothingCompared(CannotMeasure):
    """A comparison that would have been about nothing."""


class NoMemory(CannotMeasure):
    """The machine, or the device, ran out of memory: nobody knows what would have come."""


class NothingToDamage(CannotMeasure):
    """A fault cannot be planted: the installed code does not have what it damages."""


class MeasuredFailure(PcpbenchError):
    """The engine under test broke a contract; a result, not a failure of pcpbench.

    contract: the id that it counts against (SPEC 12), tensor: what it is about.
    """

    exit_code = 1
    contract = "C8"
    tensor = "graph"


class EngineError(MeasuredFailure):
    """The engine could not finish a capture, a step or a replay: it raised what nobody expects.

    The message names the exception and the place.
    """

    contract = "C0"
    tensor = "step"


class CaptureError(MeasuredFailure):
    """Code under capture did something that a graph cannot replay.

    The message names the operation, the shapes it saw, the reason, and the source line.
    """


class CollectiveMismatch(MeasuredFailure):
    """Ranks of one group met in different collectives; on real devices they would hang."""

    contract = "C11"
    tensor = "collectives"


class DispatchMismatch(MeasuredFailure):
    """Ranks chose different descriptors for one step; on real devices they would hang."""

    contract = "C10"
    tensor = "descriptor"


class BatchRejected(MeasuredFailure):
    """The engine refused a step of its own scheduler: capacities and batch do not fit."""

    contract = "C7"
    tensor = "batch"
