"""Scripts for Lightning's Fabric and Trainer: the same bits on any workers, whoever dies; Lightning's own losses."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.soaked import soaked
from tests.support import forked
from tests.support.elastic_runs import Ran, Runs
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastune.core.errors import UserError
from elastune.core.journal.records import Record, Reported
from elastune.core.run import ExecutionSettings, Program, derive
from elastune.runtime.clusters.local import WARM, LocalCluster
from elastune.train.program.load import in_session

PROGRAMS = Path(__file__).parent / "programs"
SEED = 3  # of Runs
NAMES = ("fabricated", "lightened")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """As the one that tests share, but it has imported Lightning, which takes four seconds of a processor."""
    # A server that is forked from this process may inherit a lock that one of its threads held: all workers then hang.
    with forked.started_by(subprocess), LocalCluster(capacity=3, preload=(*WARM, "lightning.pytorch")) as place:
        yield place


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    def alone(name: str) -> Ran:
        return Runs(cluster, tmp_path_factory.mktemp("alone"), Program(PROGRAMS / f"{name}_disturbed.py"))(1)

    return {name: alone(name) for name in NAMES}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_script_comes_to_the_same_though_workers_die_in_a_step_and_in_an_evaluation(
    cluster: LocalCluster, tmp_path: Path, undisturbed: dict[str, Ran], name: str
) -> None:
    runs = Runs(cluster, tmp_path, Program(PROGRAMS / f"{name}_disturbed.py"))
    three = runs(3, faults=["kill 1 2 loss", "kill 2 3 loss"])
    assert three.lost == [1, 2]
    assert three.sha256 == undisturbed[name].sha256
    assert three.reports == undisturbed[name].reports
    assert three.ledger.exact


@pytest.mark.parametrize("name", NAMES)
def test_a_divided_evaluation_comes_to_the_same(
    cluster: LocalCluster, tmp_path: Path, undisturbed: dict[str, Ran], name: str
) -> None:
    """Of 50 samples in four batches of 16, no worker of several reads all."""
    alone = undisturbed[name]
    for faults in ([], ["kill 2 2 loss"]):
        divided = Runs(cluster, tmp_path, Program(PROGRAMS / f"{name}_disturbed.py"))(3, divide=True, faults=faults)
        assert divided.sha256 == alone.sha256
        for ours, wanted in zip(divided.reports, alone.reports, strict=True):
            assert (wanted["seen"], ours["seen"] < 50) == (50, True)
            assert ours == pytest.approx(wanted | {"seen": ours["seen"]}, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "steps"), [("fabricated", 3), ("lightened", 4), *soaked(("fabricated", 4), ("lightened", 3))]
)
def test_a_resumed_script_repeats_nothing(
    cluster: LocalCluster, tmp_path: Path, undisturbed: dict[str, Ran], name: str, steps: int
) -> None:
    runs, whole = Runs(cluster, tmp_path, Program(PROGRAMS / f"{name}_disturbed.py")), undisturbed[name]
    first = runs(2, out=tmp_path / "out", spec={"max_steps": steps})
    again = runs(1, out=tmp_path / "out", spec={"resume": True})
    assert again.sha256 == whole.sha256
    assert first.reports[0] == whole.reports[0]
    assert again.reports == whole.reports[1:]


def itself(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with Lightning's own objects."""
    spec = importlib.util.spec_from_file_location(f"{name}_itself", PROGRAMS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    result = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setenv("LIGHTNING_ITSELF", "1")
        spec.loader.exec_module(result)
    return result


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in NAMES),
        ("fabricated", {"scale": 1024.0}),
        ("lightened", {"accumulate": 3}),
        *soaked(("lightened", {"scale": 1024.0})),
    ],
)
def test_it_trains_as_lightning_does(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    settings = {"shuffle": False, "dropout": 0.0} | options
    plain = itself(name, monkeypatch)
    plain.config.update(settings)
    if name == "fabricated":
        monkeypatch.setattr(plain.Fabric, "seed_everything", lambda *given: None)
    torch.manual_seed(derive(SEED, "init"))
    with monkeypatch.context() as patch:
        patch.setenv("LIGHTNING_ITSELF", "1")
        result = plain.main()
    assert len(result) == plain.config["epochs"]
    ours = Runs(cluster, tmp_path, Program(PROGRAMS / f"{name}_disturbed.py"))(2, **settings)
    near = 5e-3 if "scale" in options else 1e-5
    assert [report["loss"] for report in ours.reports] == pytest.approx(result, abs=near)
    assert ours.outcome.steps == plain.config["epochs"] * 3 // options.get("accumulate", 1)


@pytest.mark.parametrize("name", ["lightened", *soaked("fabricated")])
def test_gradients_are_scaled_alike_whoever_dies(
    cluster: LocalCluster, tmp_path: Path, undisturbed: dict[str, Ran], name: str
) -> None:
    runs = Runs(cluster, tmp_path, Program(PROGRAMS / f"{name}_disturbed.py"))
    too_large = 2.0**24  # at first: such steps change nothing
    one, three = runs(1, scale=too_large), runs(3, scale=too_large, faults=["kill 1 2 loss", "kill 2 3 loss"])
    assert one.sha256 != undisturbed[name].sha256
    assert three.lost == [1, 2]
    assert (three.sha256, three.reports) == (one.sha256, one.reports)


def test_accumulated_batches_are_a_step_on_any_workers(cluster: LocalCluster, tmp_path: Path) -> None:
    runs = Runs(cluster, tmp_path, Program(PROGRAMS / "lightened_disturbed.py"))
    one, three = runs(1, accumulate=2), runs(3, accumulate=2, faults=["kill 1 2 loss"])
    assert one.outcome.steps == 6, "of 40 samples and of 20, in each of three epochs"
    assert three.lost == [1]
    assert (three.sha256, three.reports) == (one.sha256, one.reports)


def test_an_early_stop_is_that_of_all(cluster: LocalCluster, tmp_path: Path) -> None:
    settings = {"epochs": 9, "lr": 0.0, "patience": 1}
    ran = Runs(cluster, tmp_path, Program(PROGRAMS / "lightened_disturbed.py"))(2, **settings)
    assert len(ran.reports) == 2
    assert (ran.outcome.stopped, ran.outcome.steps) == ("program", 6)


def test_a_script_is_run_by_the_command_line(command_here: Any, tmp_path: Path) -> None:
    ran = command_here("run", PROGRAMS / "lightened.py", "--set", "lr=0.03", "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    assert 0 < ran.json["metrics"]["accuracy"] <= 1


@pytest.mark.parametrize("name", ["lightened", *soaked("fabricated")])
def test_a_script_is_tuned_by_the_command_line(command_here: Any, tmp_path: Path, name: str) -> None:
    """A trial that pauses after an epoch and goes on begins its script again."""
    options = ("--trials", 3, "--epochs", 4, "--sampler", "random", "--stopping", "asha", "--out", tmp_path / "study")
    tuned = command_here("tune", PROGRAMS / f"{name}_tuned.py", *options, "--json")
    assert tuned.code == 0, tuned.err
    assert sum(tuned.json["trials"].values()) == 3
    assert set(tuned.json["trials"]) == {"complete", "paused"}
    (best,) = tuned.json["front"]
    assert 1e-3 <= best["config"]["lr"] <= 1e-1
    assert best["config"]["lr"] != 0.02, "the settings that the script has without a study"


def turned_off(module: Any) -> None:
    module.automatic_optimization = False


def test_a_manual_optimization_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightened

    monkeypatch.setattr(lightened.Classifier, "setup", lambda module, stage: turned_off(module), raising=False)
    monkeypatch.setitem(lightened.config, "options", {"gradient_clip_val": None})
    with pytest.raises(UserError, match=r"a step in each optimizer.step\(\).*has turns"):
        in_session(lambda session: lightened.main())(lone_session(tmp_path))


@pytest.mark.parametrize("options", [{"limit_train_batches": 2}, {"fast_dev_run": True}, {"accumulates": {0: 1, 1: 2}}])
def test_what_the_trainer_would_do_otherwise_is_refused(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightened
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    if "accumulates" in options:
        options = {"callbacks": [GradientAccumulationScheduler(options["accumulates"])]}
    monkeypatch.setitem(lightened.config, "options", options)
    with pytest.raises(UserError, match="one step of one optimizer"):
        in_session(lambda session: lightened.main())(lone_session(tmp_path))


def test_a_test_behind_the_training_is_reported_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightened

    def tested(session: Any) -> None:
        lightened.main()
        (trainer,) = trainers
        trainer.test(lightened.Classifier(), lightened.loaders(False)[1], verbose=False)

    def seen(*given: Any, **options: Any) -> Any:
        trainers.append(plain(*given, **options))
        return trainers[0]

    trainers, result, plain = [], list[Record](), lightened.Trainer
    monkeypatch.setattr(lightened, "Trainer", seen)
    monkeypatch.setattr(lightened.Classifier, "test_step", lambda module, batch, at: module.log("tested", 0.5), False)
    in_session(tested)(lone_session(tmp_path, send=result.append))
    reports = [sorted(each.metrics) for each in result if isinstance(each, Reported)]
    assert reports == [["accuracy", "loss", "rate", "right", "seen"]] * lightened.config["epochs"] + [["tested"]]


def test_a_module_without_an_optimizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightened

    monkeypatch.setattr(lightened.Classifier, "configure_optimizers", lambda module: None)
    with pytest.raises(UserError, match="no optimizer"):
        in_session(lambda session: lightened.main())(lone_session(tmp_path))


@pytest.fixture(autouse=True)
def _programs_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))


def ours(**options: Any) -> Any:
    """Our Fabric, imported where a test needs it: every process that runs tests would wait for Lightning."""
    from elastune.adapters.fabric import Fabric

    return Fabric(**options)


def test_what_fabric_does_otherwise_is_refused(tmp_path: Path) -> None:
    def tried(session: Any) -> None:
        fabric, model = ours(), nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UserError, match="in one call"):
            fabric.setup_optimizers(optimizer)
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4))
        assert len(loader) == 2
        assert len(loader.dataset) == 8
        for (x,) in loader:
            loss = model(x).square().mean()
            with pytest.raises(UserError, match="no options of backward"):
                fabric.backward(loss, retain_graph=True)
            fabric.backward(loss)
            with pytest.raises(UserError, match="clipped is 2"):
                fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1.0)
            fabric.clip_gradients(model, optimizer, clip_val=2**-10)
            assert not session.ends_step or float(model.weight.grad.abs().max()) <= 2**-10
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(tmp_path / "state.ckpt", {"model": model, "step": 2})
        held = {"model": nn.Linear(2, 1), "step": 0}
        fabric.load(tmp_path / "state.ckpt", held)
        assert held["step"] == 2
        assert torch.equal(held["model"].weight, model.weight)

    in_session(tried)(lone_session(tmp_path))


def test_gradients_are_clipped_without_their_scale(tmp_path: Path) -> None:
    from lightning.fabric.plugins import MixedPrecision

    def tried(session: Any) -> None:
        fabric = ours(plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0)))
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=8)):
            fabric.backward(model(x).mean())
            norm = float(fabric.clip_gradients(model, optimizer, max_norm=9.0))
            assert norm == pytest.approx(2**0.5 if session.ends_step else 0.0)
            optimizer.step()
            optimizer.zero_grad()
        assert session.step == 1

    in_session(tried)(lone_session(tmp_path))


def test_batches_that_a_script_adds_up_are_refused(tmp_path: Path) -> None:
    def tried(session: Any) -> None:  # as if the parts of a batch were batches
        fabric, model = ours(), nn.Linear(2, 1)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4))
        for number, (x,) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                fabric.backward(model(x).square().mean() / 2)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(UserError, match=r"each batch of a loader is a step.*--micro-batch"):
        in_session(tried)(lone_session(tmp_path))


def test_two_losses_of_a_batch_are_told_from_batches_that_are_added_up(tmp_path: Path) -> None:
    def tried(session: Any) -> None:
        fabric, model = ours(), nn.Linear(2, 1)
        model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)):
            fabric.backward(model(x).square().mean())
            fabric.backward(model(x).mean())

    with pytest.raises(UserError, match=r"a second time in one.*one \+ other"):
        in_session(tried)(lone_session(tmp_path))


def test_an_optimizer_may_evaluate_a_batch_several_times(tmp_path: Path) -> None:
    """By a closure, as LBFGS does."""
    losses: list[float] = []

    def tried(session: Any) -> None:
        fabric, model = ours(), nn.Linear(2, 1)
        model, optimizer = fabric.setup(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
        for (x,) in fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)):

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                fabric.backward(loss)
                losses.append(float(loss.detach()))
                return loss

            optimizer.step(closure)
        assert session.step == 2

    in_session(tried)(lone_session(tmp_path, execution=ExecutionSettings(mode="fast", num_slots=1)))
    assert len(losses) > 2
    assert losses[-1] < losses[0]


def test_outside_of_a_run_it_says_so() -> None:
    with pytest.raises(UserError, match="belongs into a run"):
        ours()
