"""Fuzzers: small and the same each time by default; with ``FUZZ=N`` N times as many examples, other ones each time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
