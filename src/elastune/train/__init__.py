"""Training on one worker: the session that a program calls, the step, data, checkpoints, policies at work."""
