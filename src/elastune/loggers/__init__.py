"""Loggers: what a run or a study has journaled, for trackers and other programs. One file each."""
