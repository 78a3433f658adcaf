"""Mechanisms whose workers hold a part of the state each: what is held, how it is updated, how it moves."""
