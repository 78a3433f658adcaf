"""Agents: workers of other hosts."""
