"""Append-only typed records of a run or a study."""
