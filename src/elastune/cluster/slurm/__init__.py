"""Slurm starts agents: as jobs of one node each, or as steps of the allocation that the controller is in."""
