"""Run programs that were written for other frameworks, with few changes, on a session of elastune's."""
