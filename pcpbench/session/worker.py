"""`pcpbench worker`: one job on stdin, one result on stdout. What the gate starts, not people.

Owns nothing but the way in and out.
"""

from __future__ import annotations

import sys

import msgspec

from pcpbench.errors import UsageError
from pcpbench.gate_jobs import SampleJob
from pcpbench.report.printable import ascii_json
from pcpbench.session.judging import judge_job
from pcpbench.session.sampling import time_job


def run_worker() -> int:
    """Do the job on stdin; raises what the engine and the loader raise."""
    try:
        job = msgspec.json.decode(sys.stdin.buffer.read(), type=SampleJob)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"stdin holds no job ({error}): this command is started by `pcpbench gate`."
        ) from error
    result = judge_job(job) if job.judge else time_job(job)
    sys.stdout.write(ascii_json(msgspec.json.encode(result).decode()) + "\n")
    sys.stdout.flush()
    return 0
