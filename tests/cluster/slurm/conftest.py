"""One Slurm for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastune.testing.slurm import VirtualSlurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualSlurm]:
    with VirtualSlurm(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        yield cluster
