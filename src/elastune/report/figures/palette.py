"""Colours that stay apart for colour-blind readers and in grey (Okabe and Ito, "Color Universal Design", 2008)."""

from __future__ import annotations

BEFORE = "#D55E00"  # vermillion
AFTER = "#0072B2"  # blue
BEST = "#009E73"  # bluish green
PICK = "#CC79A7"  # reddish purple
QUIET = "#8A8F98"
INK = "#1F2430"
GRID = "#E3E6EB"

SEQUENCE = (AFTER, BEFORE, BEST, PICK, "#E69F00", "#56B4E9")
"""For series without a role of their own, in order."""
