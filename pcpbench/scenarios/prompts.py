"""Token ids of a prompt, drawn from names alone: equal on every machine and for every arm.

Owns the draw. Knows no tokenizer: ids are uniform over the vocabulary.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np


def prompt_token_ids(
    scenario: str, prompt_key: str, prompt_len: int, *, vocab_size: int, seed: int = 0
) -> tuple[int, ...]:
    """`prompt_len` ids in [0, vocab_size) that depend on seed, scenario and key only.

    A shorter prompt of the same key is the beginning of a longer one. Raw 64-bit draws are reduced
    by remainder, so that another vocabulary keeps the stream; the bias is below vocab / 2**64.
    """
    entropy = [seed, crc32(scenario.encode()), crc32(prompt_key.encode())]
    raw = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy))).bit_generator
    draws = np.asarray(raw.random_raw(prompt_len), dtype=np.uint64) % np.uint64(vocab_size)
    return tuple(int(token) for token in draws)
