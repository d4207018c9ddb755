"""Runs vLLM's own unit tests against its classes and against pcpbench's in their place."""
