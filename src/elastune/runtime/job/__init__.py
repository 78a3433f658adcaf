"""Run one training: its workers supervised, its end handled."""
