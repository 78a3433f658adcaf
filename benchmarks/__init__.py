"""Benchmarks, by question: `python -m benchmarks.FOLDER.NAME` from the root of the repository."""
