"""Watch a training command from outside, on one process and on several, and say where the two differ."""
