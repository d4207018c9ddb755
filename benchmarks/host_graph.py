"""Eager against host-graph replay of one small decoder step, interleaved, on one thread.

    python benchmarks/host_graph.py [--seconds 4] [--batches 1 8 64]

Each row is one model and batch size. Both arms run in inference mode on the same buffers, taking
turns step by step, so that a noisy neighbour hits both; times are medians of single steps in
microseconds with the 10th and 90th percentile, and the ratio is the median of the paired ratios.
Before timing, the row checks that replay has eager's bits; a row that does not says so and has no
ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pcpbench.device.host_graph import HostGraphBackend

CONTEXT = 64
VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of one decoder."""

    name: str
    width: int
    num_layers: int
    num_heads: int


SHAPES = (Shape("tiny", 64, 2, 4), Shape("small", 256, 4, 8))


class Decoder:
    """A pre-norm decoder with a preallocated cache: one token for each of `rows` requests."""

    def __init__(self, shape: Shape, rows: int) -> None:
        self.shape, self.rows = shape, rows
        width, source = shape.width, torch.Generator().manual_seed(0)

        def weight(num_in: int, num_out: int) -> torch.Tensor:
            return torch.randn(num_in, num_out, generator=source).mul_(num_in**-0.5)

        self.layers = [
            [
                weight(width, 3 * width),
                weight(width, width),
                weight(width, 4 * width),
                weight(4 * width, width),
            ]
            for _ in range(shape.num_layers)
        ]
        self.table = weight(VOCABULARY, width)
        self.norm = torch.ones(width)
        self.ids = torch.arange(rows)
        self.slots = torch.arange(rows) * CONTEXT + CONTEXT // 2
        self.lens = torch.full((rows,), CONTEXT // 2 + 1)
        self.cache = torch.zeros(shape.num_layers, 2, rows, CONTEXT, width)
        self.logits = torch.zeros(rows, VOCABULARY)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm, rows x width."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write this step's keys and values, then attend over the cache; rows x width."""
        rows, heads, width = self.rows, self.shape.num_heads, self.shape.width
        cache = self.cache[layer]
        cache[0].view(-1, width).index_copy_(0, self.slots, k)
        cache[1].view(-1, width).index_copy_(0, self.slots, v)
        keys = cache.view(2, rows, CONTEXT, heads, -1).transpose(2, 3)
        scores = q.view(rows, heads, 1, -1) @ keys[0].transpose(-1, -2)
        hidden = torch.arange(CONTEXT)[None, :] >= self.lens[:, None]
        scores = (scores * (width // heads) ** -0.5).masked_fill(hidden[:, None, None], -1e30)
        return (torch.softmax(scores, -1) @ keys[1]).reshape(rows, width)

    def step(self) -> torch.Tensor:
        """One decode step; next tokens, one per row."""
        x = F.embedding(self.ids, self.table)
        for layer, (qkv, merge, up, down) in enumerate(self.layers):
            x = x + self.attend(layer, *(self.normed(x) @ qkv).chunk(3, -1)) @ merge
            x = x + F.silu(self.normed(x) @ up) @ down
        self.logits.copy_(self.normed(x) @ self.table.t())
        return self.logits.argmax(-1)


def timed(fn: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def spread(seconds: list[float]) -> str:
    """Median with the 10th and 90th percentile, in microseconds."""
    deciles = statistics.quantiles(seconds, n=10)
    low, middle, high = (1e6 * each for each in (deciles[0], deciles[4], deciles[8]))
    return f"{middle:8.0f} [{low:6.0f} {high:6.0f}]"


def row(shape: Shape, rows: int, seconds: float) -> str:
    """One line of the table."""
    decoder, backend = Decoder(shape, rows), HostGraphBackend()
    pool = backend.new_pool()
    captured_in = time.perf_counter()
    graph, tokens = backend.capture(decoder.step, pool)
    captured_in = time.perf_counter() - captured_in
    graph.replay()
    logits, replayed = decoder.logits.clone(), tokens.clone()
    same = torch.equal(decoder.step(), replayed) and torch.equal(decoder.logits, logits)
    eager: list[float] = []
    replay: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        eager.append(timed(decoder.step))
        replay.append(timed(graph.replay))
    ratio = statistics.median(a / b for a, b in zip(eager, replay, strict=True))
    verdict = f"{ratio:5.2f}x" if same else "bits differ"
    return (
        f"{shape.name:6} {rows:4} {graph.num_ops:5} {spread(eager)} {spread(replay)} {verdict}"
        f"  {1e3 * captured_in:6.0f} ms  {pool.num_bytes / 1024:7.0f} KiB  n={len(eager)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=4.0, help="time spent on each row")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    request = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread; us a step: median [p10 p90]")
    print("model  rows   ops eager                    replay                   ratio  capture")
    with torch.inference_mode():
        for shape in SHAPES:
            for rows in request.batches:
                print(row(shape, rows, request.seconds), flush=True)


if __name__ == "__main__":
    main()
