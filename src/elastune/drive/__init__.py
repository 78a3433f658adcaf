"""The only loops: run a job, run a study, find the frontier."""
