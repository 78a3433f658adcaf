"""Small values: errors, seeds, cost."""

from __future__ import annotations

import pytest

from elastune.core.cost import Cost
from elastune.core.errors import UserError
from elastune.core.run import derive


def test_an_error_is_one_line_with_rule_value_and_fix() -> None:
    hostile = UserError("a\x1b[1m rule", "x" * 3_000_000 + "\u202eend", "fix\x07")
    assert str(hostile).startswith("a\\x1b[1m rule (got xxx")
    assert str(hostile).endswith("\\u202eend): fix\\x07")
    assert len(str(hostile)) < 4000
    error = UserError("workers must be at least 1", "0\n\t0", "use --workers 1")
    assert str(error) == "workers must be at least 1 (got 0 0): use --workers 1"


def test_derived_seeds_are_stable_and_apart() -> None:
    assert derive(0, "slot", 3, 1) == 4977599855181433758
    seeds = {derive(seed, name, i) for seed in range(4) for name in ("slot", "order") for i in range(500)}
    assert len(seeds) == 4 * 2 * 500
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive(1, 23) != derive(12, 3)


def test_megatron_costs_what_the_seed_says() -> None:
    """512 V100 for 2.1 days at $3.589 a GPU-hour: $92,613 (KungFu's example)."""
    cost = Cost(worker_seconds=512 * 2.1 * 24 * 3600, price_per_worker_hour=3.589)
    assert cost.total == pytest.approx(92_613, rel=1e-4)
