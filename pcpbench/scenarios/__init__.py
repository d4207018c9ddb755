"""Scenario files: schema, loader and the shipped ones."""
