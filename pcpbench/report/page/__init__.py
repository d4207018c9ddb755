"""The HTML report: sections of plots and tables made from runs on disk."""
