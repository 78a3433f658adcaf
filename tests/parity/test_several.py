"""Several models and optimizers in one run: the same bits on any workers, and those of a plain loop's updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.parity.programs import gan
from tests.soaked import soaked
from tests.support.elastic_runs import Runs
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from elastune.core.run import ExecutionSettings, Program, RunSpec, derive
from elastune.parallel.mechanisms.tensor_storage import whole
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.checkpoints.start_from import weights_in
from elastune.train.rng import epoch_order, seed_everything

PROGRAM = Program(Path(__file__).parent / "programs" / "gan.py")


@pytest.mark.parametrize(
    "faults", [["kill 1 7 after", "kill 0 11 before"], *soaked(["kill 1 3 after"], ["kill 0 4 before"])]
)
def test_bits_do_not_depend_on_workers_or_deaths(cluster: LocalCluster, tmp_path: Path, faults: list[str]) -> None:
    runs = Runs(cluster, tmp_path, PROGRAM)
    alone, three = runs(1), runs(3, faults=faults)
    assert len(three.lost) == len(faults)
    assert three.sha256 == alone.sha256
    assert three.reports == alone.reports
    for ran in (alone, three):
        assert ran.ledger.exact
        assert ran.outcome.steps == 2 * 2 * 4  # epochs, turns, batches
        assert ran.outcome.samples == 2 * 56


def test_a_run_goes_on_between_two_turns(cluster: LocalCluster, tmp_path: Path) -> None:
    spec = RunSpec(PROGRAM, tmp_path / "whole", execution=ExecutionSettings(workers=2, num_slots=4))
    undisturbed = run_job(spec, cluster=cluster)
    halted = replace(spec, out=tmp_path / "halted")
    run_job(replace(halted, max_steps=5), cluster=cluster)
    resumed = run_job(replace(halted, resume=True), cluster=cluster)
    assert (resumed.sha256, resumed.steps) == (undisturbed.sha256, 16)


def test_it_is_the_plain_loop(cluster: LocalCluster, tmp_path: Path) -> None:
    """Without normalisation, whose batches are the slots'."""
    spec = RunSpec(
        PROGRAM, tmp_path / "out", config={"normalised": False}, execution=ExecutionSettings(workers=2, num_slots=4)
    )
    run_job(spec, cluster=cluster)
    with weights_in(spec.out) as (result, _):
        kept = {name: whole(tensor) for name, tensor in result.items()}
    generator, discriminator = _plainly(spec.seed, epochs=2)
    plain = {f"Generator.{name}": tensor for name, tensor in generator.state_dict().items()}
    plain |= {f"Discriminator.{name}": tensor for name, tensor in discriminator.state_dict().items()}
    assert plain.keys() == kept.keys()
    for name, tensor in plain.items():
        assert torch.allclose(tensor, kept[name], atol=1e-6), name


def _plainly(seed: int, epochs: int) -> tuple[nn.Module, nn.Module]:
    """The textbook's loop: two updates a batch."""
    seed_everything(derive(seed, "init"))
    generator, discriminator = gan.build(False)
    first = torch.optim.Adam(discriminator.parameters(), lr=4e-3, betas=(0.5, 0.99))
    second = torch.optim.SGD(generator.parameters(), lr=2e-2, momentum=0.9)
    slower = torch.optim.lr_scheduler.StepLR(second, 3, 0.9)
    reals, noises = gan.data().tensors
    for epoch in range(epochs):
        for places in epoch_order(56, seed, epoch).split(16):
            real, noise = reals[places], noises[places]
            right, wrong = discriminator(real), discriminator(generator(noise).detach())
            first.zero_grad()
            (bce(right, torch.ones_like(right)) + bce(wrong, torch.zeros_like(wrong))).backward()
            first.step()
            result = discriminator(generator(noise))
            second.zero_grad()
            bce(result, torch.ones_like(result)).backward()
            second.step()
            slower.step()
    return generator, discriminator
