"""A script written for Hugging Face's ``Trainer``: the same bits on any workers, whoever dies; callbacks are heard."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import forked
from tests.support.elastic_runs import Runs
from tests.support.sessions import lone_session
from torch.utils.data import SequentialSampler

from elastune.core.errors import UserError
from elastune.core.journal.records import Reported
from elastune.core.run import Program
from elastune.runtime.clusters.local import WARM, LocalCluster
from elastune.train.program.load import in_session

PROGRAM = Program(Path(__file__).parent / "programs" / "hugging_disturbed.py")


@pytest.fixture(scope="module")
def warm() -> Iterator[LocalCluster]:
    """Workers that have imported the library: else each of them takes seconds to."""
    preload = (*WARM, "elastune.adapters.transformers")
    with forked.started_by(subprocess), LocalCluster(capacity=3, preload=preload) as place:  # as in test_fabric.py
        yield place


@pytest.mark.soak
def test_a_trainer_comes_to_the_same_though_workers_die(warm: LocalCluster, tmp_path: Path) -> None:
    runs, out = Runs(warm, tmp_path, PROGRAM), str(tmp_path / "trainer")
    alone, three = runs(1, out_=out), runs(3, faults=["kill 1 3 loss", "kill 2 8 loss"], out_=out)
    assert three.lost == [1, 2]
    assert three.sha256 == alone.sha256
    assert three.reports == alone.reports
    assert three.ledger.exact
    assert {"eval_loss", "eval_accuracy"} == set(alone.reports[0])


def test_a_resumed_trainer_goes_on(warm: LocalCluster, tmp_path: Path) -> None:
    """In mid-epoch; its logs, evaluations and schedule, too."""
    runs, out, trains = Runs(warm, tmp_path, PROGRAM), tmp_path / "halted", str(tmp_path / "trainer")
    whole = runs(1, out_=trains)
    first = runs(2, out=out, spec={"max_steps": 13}, out_=trains)
    again = runs(1, out=out, spec={"resume": True}, out_=trains)
    assert first.sha256 != again.sha256 == whole.sha256
    assert first.reports[0] == whole.reports[0]
    assert again.reports == whole.reports[1:]


def in_order(kind: Any) -> Any:
    """The same trainer, of samples as they lie."""
    return type("InOrder", (kind,), {"_get_train_sampler": lambda self, *_: SequentialSampler(self.train_dataset)})


@pytest.mark.parametrize("accumulated", [1, 2])
def test_it_trains_as_transformers_does(tmp_path: Path, accumulated: int) -> None:
    """The loop of Hugging Face's own: losses, rates, evaluations on the way, and weights."""
    import transformers

    from elastune.adapters.transformers import Trainer

    how = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "num_train_epochs": 2, "learning_rate": 3e-2}
    how |= {"per_device_train_batch_size": 8 // accumulated, "gradient_accumulation_steps": accumulated}
    how |= {"warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.3}
    made: dict[str, Any] = {}

    def train(session: Any) -> None:
        made["ours"] = trainer(tmp_path, in_order(Trainer), **how)
        made["ours"].train()

    in_session(train)(lone_session(tmp_path / "run"))
    made["theirs"] = trainer(tmp_path, in_order(transformers.Trainer), **how)
    made["theirs"].train()
    ours, theirs = made["ours"], made["theirs"]
    assert theirs.state.global_step == ours.state.global_step == 6
    for name in ("loss", "learning_rate", "eval_loss", "eval_accuracy"):
        values = [(entry["step"], entry[name]) for entry in theirs.state.log_history if name in entry]
        results = [(entry["step"], entry[name]) for entry in ours.state.log_history if name in entry]
        assert len(values) >= 2
        assert [step for step, _ in results] == [step for step, _ in values], name
        assert [value for _, value in results] == pytest.approx([value for _, value in values], abs=1e-5), name
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-4)  # of AdamW, which magnifies rounding


def trainer(folder: Path, kind: Any = None, callbacks: Any = (), **options: Any) -> Any:
    """Ours, or of that ``kind``. Imported where a test needs it: every process that runs tests would wait for it."""
    import transformers
    from tests.adapters.programs import hugging

    from elastune.adapters.transformers import Trainer

    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    network = transformers.GPT2Config(vocab_size=24, n_positions=12, n_embd=8, n_layer=1, n_head=1, bos_token_id=0,
                                      resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    transformers.set_seed(1)
    return (kind or Trainer)(
        model=transformers.GPT2LMHeadModel(network),
        args=transformers.TrainingArguments(str(folder), **{**settings, **options}),
        train_dataset=hugging.Text(24, 1),
        eval_dataset=hugging.Text(10, 2),
        compute_metrics=hugging.accuracy,
        callbacks=list(callbacks),
    )


def test_it_evaluates_as_transformers_does(tmp_path: Path) -> None:
    import transformers

    reports: list[dict[str, float]] = []

    def evaluate(session: Any) -> None:
        trainer(tmp_path).evaluate()

    def send(record: Any) -> None:
        if isinstance(record, Reported):
            reports.append(record.metrics)

    in_session(evaluate)(lone_session(tmp_path, send=send))
    result = trainer(tmp_path, transformers.Trainer).evaluate()
    assert reports == [{name: pytest.approx(result[name], abs=1e-6) for name in ("eval_loss", "eval_accuracy")}]


def test_steps_callbacks_and_models_are_as_asked(tmp_path: Path) -> None:
    import transformers

    def train(session: Any) -> None:
        made = trainer(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2, logging_steps=2)
        result = made.train()
        assert (result.global_step, session.step) == (4, 4)
        assert [entry["step"] for entry in made.state.log_history if "eval_loss" in entry] == [2, 4]
        made.save_model(str(tmp_path / "model"))
        assert (tmp_path / "model" / "model.safetensors").exists()

    def stop(session: Any) -> None:
        stopping = transformers.EarlyStoppingCallback(1, early_stopping_threshold=100)
        how = {"metric_for_best_model": "accuracy", "num_train_epochs": 9, "eval_strategy": "epoch"}
        made = trainer(tmp_path, callbacks=[stopping], **how)
        made.train()
        assert made.state.epoch == 2
        assert session.stopped != "complete"

    in_session(train)(lone_session(tmp_path / "a"))
    in_session(stop)(lone_session(tmp_path / "b"))


def test_what_callbacks_remember_is_state() -> None:
    from transformers import EarlyStoppingCallback, TrainerState

    from elastune.adapters.transformers import TrackedState

    one, other = (EarlyStoppingCallback(1), EarlyStoppingCallback(1))
    one.early_stopping_patience_counter = 3
    state = TrainerState(global_step=7, best_metric=0.5)
    result = TrainerState()
    TrackedState(result, [other]).load_state_dict(TrackedState(state, [one]).state_dict())
    assert (result.global_step, result.best_metric, other.early_stopping_patience_counter) == (7, 0.5, 3)


def test_what_a_run_decides_is_refused(tmp_path: Path) -> None:
    def ask(session: Any) -> None:
        with pytest.raises(UserError, match="--precision bf16"):
            trainer(tmp_path, bf16=True)
        with pytest.raises(UserError, match="--resume"):
            trainer(tmp_path).train(resume_from_checkpoint=True)

    in_session(ask)(lone_session(tmp_path))
    with pytest.raises(UserError, match="elastune run FILE"):
        trainer(tmp_path)
