"""Proof that a program trains as its plain loop does: what its steps did is recorded, compared and explained."""
