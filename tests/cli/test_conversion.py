"""Plain scripts in the shape of well-known examples: which are converted, and whether they train to the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.support.sessions import lone_session

from elastune.cli.convert.conversion import convert
from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, Program
from elastune.runtime.job.program_check import AgainstPlain, by_batch, judge_against, plain_request
from elastune.train.program.load import load, process_restored
from elastune.train.proof.compare import read_run
from elastune.train.proof.plain import observe
from elastune.train.proof.recorder import BEGINNING, Recorder, Recording
from elastune.train.step import StopTraining

PLAIN = Path(__file__).parent.parent / "programs" / "plain"
BY_ITSELF = "each step gets its data by itself"
STEPS = 8
# Each script with the words of its marks, in their order. All of these train to the same.
SAME: dict[str, tuple[str, ...]] = {
    "accumulated": ("a step had accumulation_steps batches",),
    "autoencoder": (),
    "bigram": (BY_ITSELF,),
    "cifar_script": (),
    "digits_cnn": (),
    "distributed": (),
    "gan": ("compute again in this turn: fake, label",),
    "graph": (BY_ITSELF,),
    "imagenet_like": (),
    "lstm_rows": (),
    "mixed_precision": (),
    "notebook_like": (),
    "one_function": (),
    "quickstart": (),
    "reinforce": (BY_ITSELF,),
    "seq2seq": (),
    "siamese": (),
    "step_function": (),
    "style": (),
    "super_resolution": (),
    "tiny_gpt": (BY_ITSELF,),
    "trainer_class": (),
    "transfer": (),
    "two_losses": (),
    "warmup_by_name": (),
    "words": (BY_ITSELF,),
}
REFUSED = {
    "forward_forward": "are made outside of the model's class .got self.parameters.. at forward_forward.py:11",
    "regression": "an optimizer of torch.optim must update the weights .got no optimizer.step.. in regression.py",
}
# It is converted; session.clip_grad_norm_ rounds otherwise than torch's, which RMSprop amplifies from step to step.
ROUNDED = {"trainer_self": 1e-4}
# It is converted; elastune itself runs it in one mode only.
OTHERWISE = {"sine_waves": "LBFGS evaluates a step several times"}
ARGUMENTS = {"style": ("train",)}


def compared(script: Path, program: Path, folder: Path, arguments: tuple[str, ...] = ()) -> AgainstPlain:
    """The comparison of ``elastune check --against``, in this process."""
    records, plain = folder / "records", folder / "plain"
    records.mkdir()
    plain.mkdir()
    with process_restored():
        loaded = load(Program(program, arguments=arguments))
        session = lone_session(
            folder / "run", config=loaded.config, execution=ExecutionSettings(num_slots=1), max_steps=STEPS
        )
        session.state.recorder = Recorder(Recording(str(records), beginning=True), program)
        with suppress(StopTraining):
            loaded.train(session)
        session.finish()
    run = read_run(records)
    mine = by_batch(run)
    assert (records / BEGINNING).is_file()
    outcome = observe(
        plain_request(mine, script, arguments, records, plain, 0, turns=-(-len(run.steps) // len(mine.steps)))
    )
    assert not outcome.problem
    return judge_against(script.name, mine, read_run(plain), outcome)


@pytest.fixture(autouse=True)
def _group_of_the_script() -> Iterator[None]:
    """A plain script that runs in this process may leave its process group, which later tests would meet."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_every_script_has_its_row() -> None:
    assert {path.stem for path in PLAIN.glob("*.py")} == {*SAME, *REFUSED, *ROUNDED, *OTHERWISE}
    assert len(SAME) >= 20


@pytest.mark.parametrize("name", SAME)
def test_it_trains_to_the_same(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, program = PLAIN / f"{name}.py", tmp_path / f"{name}.py"
    converted = convert(script.read_text(), script.name)
    program.write_text(converted.text)
    assert len(converted.marks) == len(SAME[name])
    for (line, words), expected in zip(converted.marks, SAME[name], strict=True):
        assert expected in words
        assert words in converted.text.splitlines()[line - 1]
    found = compared(script, program, tmp_path, ARGUMENTS.get(name, ()))
    assert (found.problem, found.steps > 3) == ("", True)


@pytest.mark.parametrize("name", ROUNDED)
def test_it_trains_to_the_same_but_for_rounding(name: str, tmp_path: Path) -> None:
    program = tmp_path / f"{name}.py"
    program.write_text(convert((PLAIN / f"{name}.py").read_text(), f"{name}.py").text)
    found = compared(PLAIN / f"{name}.py", program, tmp_path)
    assert found.steps > 3
    assert 0 < found.apart < ROUNDED[name]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_says_why(name: str) -> None:
    with pytest.raises(UserError, match=REFUSED[name]):
        convert((PLAIN / f"{name}.py").read_text(), f"{name}.py")


@pytest.mark.parametrize("name", OTHERWISE)
def test_it_is_converted_and_says_what_is_missing(name: str, tmp_path: Path) -> None:
    program = tmp_path / f"{name}.py"
    program.write_text(convert((PLAIN / f"{name}.py").read_text(), f"{name}.py").text)
    with pytest.raises(UserError, match=OTHERWISE[name]):
        compared(PLAIN / f"{name}.py", program, tmp_path)
