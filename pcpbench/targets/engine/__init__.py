"""The installed vLLM as a whole: `vllm.LLM` in a process of its own for each arm.

Owns the checkpoint that all arms load, the order that a process is given, and how it is run and
ended. The package imports no vLLM: that is done by `child/`, under another interpreter.
"""
