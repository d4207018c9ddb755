"""An engine that computes next to nothing, with the parts of vLLM's interface that we use.

FAKE_VLLM says what goes wrong in the arm with context parallelism, words with commas between them:
`raise`, `die`, `hang` (all while it starts), `die-later`, `drift=X` (all rows), `tie=X` (the two
likeliest tokens are X apart and change places, from each request's seventh token on), `at-once`
(from its first), `nan` (in every row), `never-cut` (no step goes through the PCP manager), `child`
(leaves a process behind).
"""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import engine_watch
import numpy as np

WORDS = dict(
    word.partition("=")[::2] for word in os.environ.get("FAKE_VLLM", "").split(",") if word
)
VOCAB = 256


class Tensor:
    """As much of a tensor as the watching of a run needs."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def cpu(self):
        return self

    def numpy(self):
        return self.values


class Manager:
    """Cuts tokens in two: rank 0 has the larger half."""

    def __init__(self, size):
        self.pcp_world_size = size

    def partition_batch(self, batch, desc):
        most = -(-batch.num_tokens // self.pcp_world_size)
        self._hidden_restore_idx = Tensor(np.arange(batch.num_tokens))
        return SimpleNamespace(num_tokens_after_padding=most)


class Runner:
    def __init__(self, size, dcp_size):
        self.dcp_size = dcp_size
        self.pcp_manager = Manager(size) if size > 1 else None
        self.cudagraph_manager = SimpleNamespace(
            dispatch=lambda *args: SimpleNamespace(cg_mode=SimpleNamespace(name="NONE"))
        )

    def execute_model(self, output):
        self.cudagraph_manager.dispatch()
        if self.pcp_manager is not None and "never-cut" not in WORDS:
            batch = SimpleNamespace(
                num_reqs=1,
                num_tokens=output.total_num_scheduled_tokens,
                is_prefilling_np=np.array([output.total_num_scheduled_tokens > 1]),
                num_computed_tokens_np=np.array([0]),
            )
            self.pcp_manager.partition_batch(batch, None)


class Worker(engine_watch.EngineWatch):
    def __init__(self, rank, size, dcp_size):
        self.rank, self.model_runner = rank, Runner(size, dcp_size)
        mode = SimpleNamespace(name="NONE")
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_mode=mode),
            parallel_config=SimpleNamespace(decode_context_parallel_size=dcp_size),
        )


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, **settings):
        print("the engine talks on stdout")
        size = settings["prefill_context_parallel_size"]
        self.is_cut = size > 1
        dcp_size = settings["decode_context_parallel_size"]
        self.workers = [
            Worker(rank, size, dcp_size) for rank in range(size * settings["tensor_parallel_size"])
        ]
        if self.is_cut and "child" in WORDS:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        if self.is_cut and "raise" in WORDS:
            print("ERROR [core.py] ValueError: no room for the KV cache")
            raise RuntimeError("engine core initialization failed")
        if self.is_cut and "die" in WORDS:
            os.kill(os.getpid(), 9)
        if self.is_cut and "hang" in WORDS:
            print("waiting for the other ranks")
            sys.stdout.flush()
            time.sleep(60)

    def collective_rpc(self, name, args=()):
        return [getattr(worker, name)(*args) for worker in self.workers]

    def generate(self, prompts, params, use_tqdm):
        if self.is_cut and "die-later" in WORDS:
            os.kill(os.getpid(), 9)
        return [self._one(p["prompt_token_ids"], param) for p, param in zip(prompts, params)]  # noqa: B905

    def _one(self, prompt, params):
        context, tokens, rows = list(prompt), [], []
        for number in range(params.max_tokens):
            for worker in self.workers:
                num_tokens = 1 if number else len(prompt)
                worker.model_runner.execute_model(
                    SimpleNamespace(total_num_scheduled_tokens=num_tokens)
                )
            row = self._row(context, "tie" in WORDS and (number > 5 or "at-once" in WORDS))
            tokens.append(int(row.argmax()))
            rows.append({t: SimpleNamespace(logprob=float(v)) for t, v in enumerate(row)})
            context.append(tokens[-1])
        stats = SimpleNamespace(first_token_ts=1.0, last_token_ts=1.5, first_token_latency=0.25)
        logprobs = None if params.logprobs is None else rows
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)], metrics=stats
        )

    def _row(self, context, is_tie):
        logits = np.random.default_rng(context).standard_normal(VOCAB) * 3.0
        first, second = np.argsort(logits)[[-1, -2]]
        if is_tie:
            gap = float(WORDS["tie"])
            logits[second] = logits[first] - gap
            if self.is_cut:
                logits[[first, second]] += [-gap, gap / 2]
        if self.is_cut and "drift" in WORDS:
            logits[int(np.argsort(logits)[0])] += float(WORDS["drift"])
        if self.is_cut and "nan" in WORDS:
            return logits * np.array([np.nan] + [1.0] * (VOCAB - 1))
        return logits - np.log(np.exp(logits).sum())
