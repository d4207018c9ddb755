from dataclasses import dataclass


@dataclass
class EngineArgs:
    prefill_context_parallel_size: int = 1
