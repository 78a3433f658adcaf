"""A model in stages trains as it does whole, to the bit, whatever the schedule, the stages and the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.soaked import soaked

from elastune.core.run import Schedule
from elastune.testing.worker_processes import processes

SCHEDULES: list[Schedule] = ["1f1b", "gpipe", "interleaved", "zero-bubble"]


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def trained(cases: list[Any], stages: int) -> list[list[tuple[Any, ...]]]:
    """By case and worker: state, evaluation, losses."""
    import piped

    with processes(stages, piped.train, cases, stages) as them:
        results = [[them.receive(rank)[1:] for rank in range(stages)] for _ in cases]
        for rank in range(stages):
            them.send(rank, "end")
        return results


@pytest.mark.parametrize("stages", [3, *soaked(2, 4)])
def test_bits_of_one_process(stages: int) -> None:
    """Every parameter is on one stage, buffers, evaluations and what BatchNorm counts on all of them."""
    import piped

    models = ["cnn", "transformer", "tied"]
    cases = [piped.Case(model, schedule) for model in models for schedule in SCHEDULES]
    cases += [piped.Case("mlp"), piped.Case("cnn", "interleaved", abandons=True)]
    cases += [piped.Case("tied", "interleaved", micro_batch=1), piped.Case("transformer", "zero-bubble", micro_batch=2)]
    wanted = {model: piped.alone(piped.Case(model)) for model in [*models, "mlp"]}
    for case, workers in zip(cases, trained(cases, stages), strict=True):
        state, evaluation, losses = (
            wanted[case.model] if case.micro_batch is None and not case.abandons else piped.alone(case)
        )
        results = [losses for _, _, losses in workers if losses is not None]
        assert results == [losses], case
        owners: dict[str, int] = {}
        for own, seen, _ in workers:
            assert torch.equal(seen, evaluation), case
            for name, tensor in own.items():
                owners[name] = owners.get(name, 0) + 1
                assert torch.equal(tensor, state[name]), (case, name)
        buffers = {name for name in state if "running" in name or "tracked" in name}
        assert owners == {name: stages if name in buffers else 1 for name in state}, case


@pytest.mark.parametrize(("stages", "schedules"), [(2, SCHEDULES), *soaked((3, ["zero-bubble"]))])
def test_bits_of_checkpointed_activations_and_of_bf16(stages: int, schedules: list[Schedule]) -> None:
    """What a stage computes again in its backward pass is what it computed, at whatever time the schedule has it."""
    import piped

    kinds = [("checkpointed", False), ("transformer", True), ("cnn", True), ("checkpointed", True)]
    cases = [piped.Case(model, schedule, bf16=bf16) for model, bf16 in kinds for schedule in schedules]
    wanted = {kind: piped.alone(piped.Case(kind[0], bf16=kind[1])) for kind in kinds}
    for case, workers in zip(cases, trained(cases, stages), strict=True):
        state, _, losses = wanted[case.model, case.bf16]
        assert [result for _, _, result in workers if result is not None] == [losses], case
        for own, _, _ in workers:
            for name, tensor in own.items():
                assert torch.equal(tensor, state[name]), (case, name)
