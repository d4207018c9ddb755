"""`pcpbench check partition`: all small batches, or a sample, through every maker of a partition.

Owns the order of a run: which pieces are left, in how many processes, and how it ends early. A line
on disk for each finished piece is all the state there is.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from typing import Any

import msgspec

from pcpbench.code_version import versions
from pcpbench.errors import CannotMeasure, UsageError
from pcpbench.partition_request import Part, PartitionRequest
from pcpbench.partition_results import ORACLE, PartCount, PartitionResult
from pcpbench.report.console import make_console
from pcpbench.report.json_out import print_text
from pcpbench.report.matrix_files import locked
from pcpbench.report.partition_files import (
    PartitionFiles,
    kept_parts,
    partition_json,
    stored_settings,
)
from pcpbench.report.partition_view import print_partition, print_partition_verdict
from pcpbench.report.progress import Progress, make_progress
from pcpbench.results import Outcome
from pcpbench.session.partition_parts import Makers, PartRunner, makers_of

COMMAND = "check-partition"
OUT_OF_TIME = "--max-time was over; --resume goes on"
SECONDS_BETWEEN_TABLES = 30.0


def run_partition(request: PartitionRequest) -> int:
    """Run what is left, print the report and return the exit code."""
    start = time.monotonic()
    request.check()
    makers = makers_of(request.settings.target, request.settings.exhaustive)
    # torch comes after the target, which may have to be there before Triton is
    from pcpbench.device.backends import resolve_device
    from pcpbench.device.environment import environment_of

    environment = environment_of(resolve_device("cpu"))
    stored = _stored(request, makers)
    parts = request.settings.parts
    for pcp, dcp in dict.fromkeys(part.ranks[:2] for part in parts):
        for each in makers:
            each.check(pcp, dcp)
    kept: list[PartCount] = []
    with ExitStack() as stack:
        if request.resume is not None:
            _check_resumed(request, stored)
            stack.enter_context(locked(request.resume))
            kept = kept_parts(request.resume, [part.name for part in parts])
        files = stack.enter_context(
            PartitionFiles(
                COMMAND,
                request.out,
                settings=stored,
                environment=environment,
                resume=request.resume,
            )
        )
        if request.resume is None:
            stack.enter_context(locked(files.path))
        else:
            files.keep(kept)
        run = _Run(request, parts, kept, files)

        def result() -> PartitionResult:
            return PartitionResult(
                command=COMMAND,
                makers=(ORACLE, *(each.name for each in makers)),
                parts=tuple(run.done),
                num_parts=len(parts),
                settings=stored,
                environment=environment,
                wall_s=time.monotonic() - start,
                run_dir=str(files.path),
                stopped=run.stopped,
            )

        try:
            with make_progress() as progress:
                run.run(PartRunner(makers), progress, result)
        except BaseException as error:
            files.write_tables(result())
            # A difference that was seen stands, whatever kept the rest from being looked at.
            if not isinstance(error, CannotMeasure) or result().outcome is not Outcome.FAIL:
                raise
            run.stopped = str(error).rstrip(".")
        ended = result()
        files.finish(ended)
    _print(ended, request.json)
    return ended.outcome.exit_code


def _stored(request: PartitionRequest, makers: Sequence[Makers]) -> dict[str, Any]:
    """The settings as a run that goes on must have them, the target's version among them."""
    known: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(request.settings))
    found = [each.version for each in makers if each.version]
    named = {"target_version": " ".join(found)} if found else {}
    return {**known, **named, "versions": dict(versions())}


def _check_resumed(request: PartitionRequest, stored: dict[str, Any]) -> None:
    """Raise UsageError unless the earlier run was asked the same of the same code."""
    assert request.resume is not None
    earlier = stored_settings(request.resume)
    for name, value in stored.items():
        if earlier.get(name) != value:
            raise UsageError(
                f"--resume {str(request.resume)!r} was made with {name} {earlier.get(name)}, now "
                f"{value}: give the same options to the same version, or start a new run."
            )


def _print(result: PartitionResult, as_json: bool) -> None:
    if as_json:
        print_text(partition_json(result))
        print_partition_verdict(result, make_console(sys.stderr))
    else:
        print_partition(result, make_console())


class _Run:
    """The pieces that are left, and those that are done. stopped: why some were not begun."""

    def __init__(
        self,
        request: PartitionRequest,
        parts: Sequence[Part],
        kept: Sequence[PartCount],
        files: PartitionFiles,
    ) -> None:
        names = {part.name for part in kept}
        self.done, self.stopped = list(kept), ""
        self._left = [part for part in parts if part.name not in names]
        self._request, self._files = request, files
        self._written_at = time.monotonic()

    def run(
        self, runner: PartRunner, progress: Progress, result: Callable[[], PartitionResult]
    ) -> None:
        """Run all pieces that are left, none begun after --max-time."""
        progress.start("partition", len(self._left), "parts")
        limit = self._request.max_time
        deadline = None if limit is None else time.monotonic() + limit
        jobs = min(self._request.jobs, len(self._left))
        parts = self._until(deadline)
        counts = map(runner.run, parts) if jobs < 2 else self._in_processes(parts, jobs)
        for count in counts:
            self.done.append(count)
            self._files.add_part(count)
            progress.advance()
            if time.monotonic() - self._written_at > SECONDS_BETWEEN_TABLES:
                self._files.write_tables(result())
                self._written_at = time.monotonic()

    def _until(self, deadline: float | None) -> Iterator[Part]:
        for part in self._left:
            if deadline is not None and time.monotonic() >= deadline:
                self.stopped = OUT_OF_TIME
                return
            yield part

    def _in_processes(self, parts: Iterator[Part], jobs: int) -> Iterator[PartCount]:
        """Pieces in processes of their own; a process keeps its targets from piece to piece."""
        pool = ProcessPoolExecutor(
            jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(self._request.settings.target, self._request.settings.exhaustive),
        )
        try:
            pending = set()
            for part in parts:
                pending.add(pool.submit(_run_part, part))
                if len(pending) >= jobs + 1:
                    ended, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from _results(ended)
            while pending:
                ended, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from _results(ended)
        except BrokenProcessPool as error:
            raise CannotMeasure(
                "a process of --jobs ended without a result (it was killed, had no memory, or "
                "could not start): take fewer --jobs, or go on with --resume."
            ) from error
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _results(ended: Iterable[Future[PartCount]]) -> Iterator[PartCount]:
    """Of those that have one first: the others raise."""
    for future in sorted(ended, key=lambda future: future.exception() is not None):
        yield future.result()


class _Here:
    """What a process of the pool keeps: nothing else may live in a module."""

    runner: PartRunner


def _begin(target: str, exhaustive: bool) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _Here.runner = PartRunner(makers_of(target, exhaustive))


def _end_with_parent() -> None:
    """A first process that was killed can end no other, and nobody would take their results."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _run_part(part: Part) -> PartCount:
    return _Here.runner.run(part)
