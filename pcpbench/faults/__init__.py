"""Faults that can be injected into the engine, and what each of them must trip."""
