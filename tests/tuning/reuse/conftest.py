"""A study whose trials have left weights and predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

ASSETS = Path(__file__).parents[2] / "programs" / "assets.py"


@pytest.fixture(scope="session")
def kept_study(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of six trials. Nothing may be changed in it."""
    out = tmp_path_factory.mktemp("kept") / "out"
    tune(StudyRequest(Program(ASSETS), out, sampler="random", trials=6, workers=2, keep="all", seed=1), cluster=cluster)
    return out
