"""Turns results into console text, CSV, JSON and manifests."""
