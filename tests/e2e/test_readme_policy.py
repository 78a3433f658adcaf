"""The policy that the README shows, word for word, on a run that has as many workers as it may have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastune.core.journal.records import Decided, PolicyFailed, Record, Regrouped
from elastune.core.run import Adapt, Elastic, ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

ROOT = Path(__file__).parents[2]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """The example with the README's class in the place of its own."""
    (shown,) = re.findall(r"```python\n(class GNSPolicy.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example = (ROOT / "examples" / "gns_policy.py").read_text()
    text, replaced = re.subn(r"class GNSPolicy.*?(?=\n\n\ndef )", lambda _: shown.rstrip(), example, flags=re.DOTALL)
    assert replaced == 1
    path = tmp_path / "program.py"
    path.write_text(text)
    return Program(path)


@pytest.mark.parametrize(("low", "high", "note"), [(1, 2, "from 1 to 2"), (2, 2, "has 2 throughout")])
def test_at_the_bound_it_is_told_once_and_stays_on(
    cluster: LocalCluster, tmp_path: Path, program: Program, low: int, high: int, note: str
) -> None:
    records: list[Record] = []
    spec = RunSpec(
        program,
        tmp_path / "out",
        execution=ExecutionSettings(workers=high),
        elastic=Elastic(low, high),
        epochs=4,
        adapt=Adapt(policies=("GNSPolicy",)),
    )
    run_job(spec, cluster=cluster, observe=records.append)
    assert not [record for record in records if isinstance(record, PolicyFailed | Regrouped)]
    (result,) = [record for record in records if isinstance(record, Decided)]
    assert (result.outcome, result.decision) == ("refused", {"workers": 3})
    assert note in result.detail
