"""Fixtures that several rooms share."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from elastune.cluster.local import LocalCluster

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Four local workers, forked from one warm server for the whole test run."""
    with LocalCluster(capacity=4) as place:
        yield place
