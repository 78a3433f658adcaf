"""One step of a program without workers: its sizes, exactly, and its errors, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.core.run import Program
from elastune.train.program.load import load_as_guest
from elastune.train.rehearsal import ProgramSize, rehearse, rehearse_apart

TWO_LAYERS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

config = {"batch_size": 16, "width": 32, "looks": False, "fails": False}

def train(session):
    data = TensorDataset(torch.randn(100, 8), torch.randn(100, 4))
    width = session.config["width"]
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
    model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters()))
    for _ in session.epochs(3):
        for x, y in session.batches(data, batch_size=session.config["batch_size"]):
            if session.config["fails"]:
                raise SystemExit(3) if session.config["fails"] == "exit" else RuntimeError("no such thing")
            loss = nn.functional.mse_loss(model(x), y)
            if session.config["looks"]:
                loss.item()
            session.backward(loss)
            optimizer.step()
"""


@pytest.fixture
def program(tmp_path: Path) -> Program:
    (tmp_path / "two.py").write_text(TWO_LAYERS)
    return Program(tmp_path / "two.py")


def size_of(program: Program, **config: object) -> ProgramSize:
    return rehearse(load_as_guest(program), program, dict(config))  # type: ignore[arg-type]


def test_the_sizes_of_two_layers_are_those_of_a_pencil(program: Program) -> None:
    size = size_of(program)
    numbers = 8 * 32 + 32 + 32 * 4 + 4
    assert (size.samples, size.batch_size, size.epochs, size.steps) == (100, 16, 3, 21)
    assert (size.parameter_bytes, size.gradient_bytes) == (4 * numbers, 4 * numbers)
    assert size.optimizer_bytes == pytest.approx(8 * numbers, abs=100)  # two moments, and a count for each tensor
    forward = 2 * (8 * 32 + 32 * 4)
    assert size.flops == pytest.approx(3 * forward - 2 * 8 * 32)  # nobody asks for the gradient of the data
    assert size.layers == 3
    assert size.divided == pytest.approx(1.0, abs=0.05)
    assert size.fake
    # by columns, then by rows: the gradient of the first one's input is summed, and the output of the second
    assert (size.whole_flops, size.tensor_sums, size.summed_bytes) == (0.0, 2, 4 * (8 + 4))


def test_the_fullest_stage_is_that_of_the_cut_which_a_pipeline_makes(tmp_path: Path) -> None:
    """By parameters: a wide layer behind three narrow ones is a stage of its own, and so is each of these."""
    rows = (
        "nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4 * width), nn.ReLU(), nn.Linear(4 * width, 4)"
    )
    (tmp_path / "four.py").write_text(TWO_LAYERS.replace("nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)", rows))
    size = size_of(Program(tmp_path / "four.py"))
    narrow, wide, last = 64, 8 * 128, 128 * 4
    whole = 3 * narrow + wide + last
    assert size.layers == len(size.fullest) == 6
    assert size.fullest[:4] == pytest.approx((1.0, (3 * narrow + wide) / whole, wide / whole, wide / whole))
    held = 3 * 9 * 8 + 9 * 128 + 129 * 4
    assert size.fullest_bytes[:3] == pytest.approx((1.0, (held - 129 * 4) / held, 9 * 128 / held))


def test_a_module_that_two_layers_call_does_a_part_in_each(tmp_path: Path) -> None:
    twice = "nn.Linear(8, 8), *[nn.Linear(8, 8)] * 2, nn.Linear(8, 4)"
    (tmp_path / "twice.py").write_text(TWO_LAYERS.replace("nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)", twice))
    assert size_of(Program(tmp_path / "twice.py")).fullest[3] == pytest.approx(64 / (3 * 64 + 32))


def test_arithmetic_outside_of_layers_is_in_no_stage(program: Program, tmp_path: Path) -> None:
    assert size_of(program).fullest[0] == 1.0
    outside = TWO_LAYERS.replace("mse_loss(model(x), y)", "mse_loss(model(x) @ torch.ones(4, 4), y)")
    (tmp_path / "outside.py").write_text(outside)
    assert size_of(Program(tmp_path / "outside.py"), width=8).fullest == ()


def test_a_layer_that_is_not_divided_does_its_arithmetic_whole(tmp_path: Path) -> None:
    other = TWO_LAYERS.replace("nn.Sequential(nn.Linear(8", "nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8")
    other = other.replace("nn.Tanh()", "nn.Softmax(1)")  # between two layers that are then no pair
    (tmp_path / "three.py").write_text(other)
    size = size_of(Program(tmp_path / "three.py"))
    forward = {"first": 2 * 8 * 8, "pair": 2 * (8 * 32 + 32 * 4)}
    assert size.tensor_sums == 2
    assert size.whole_flops / size.flops == pytest.approx(forward["first"] / sum(forward.values()))


def test_what_is_kept_grows_with_the_width_and_parameters_are_not_in_it(program: Program) -> None:
    narrow, wide = size_of(program), size_of(program, width=64)
    per_unit = (wide.kept_bytes - narrow.kept_bytes) / 32
    assert 4 <= per_unit <= 8  # the output of ReLU, and perhaps its input
    assert narrow.kept_bytes < narrow.parameter_bytes


def test_a_program_that_looks_at_values_is_rehearsed_with_real_ones(program: Program) -> None:
    size = size_of(program, looks=True)
    assert not size.fake
    fake = size_of(program)
    assert size.pass_bytes == pytest.approx(fake.pass_bytes, rel=0.2)
    alike = {"fake": False, "pass_bytes": size.pass_bytes, "pass_fixed_bytes": size.pass_fixed_bytes}
    assert size == ProgramSize(**{**vars(fake), **alike})


def test_what_a_pass_needs_grows_with_its_samples_and_gradients_are_not_in_it(program: Program) -> None:
    size = size_of(program, width=512)
    assert 512 * 4 <= size.pass_bytes < 3 * 512 * 4 + 200  # of one sample: outputs, and the gradient on its way back
    assert size.pass_bytes >= size.kept_bytes
    assert size.pass_fixed_bytes <= 9 * 512 * 4 + 100  # one layer's gradient until it is where it belongs


def test_a_program_that_fails_tells_its_own_error_and_line(program: Program) -> None:
    with pytest.raises(UserError, match=r"RuntimeError: no such thing \(two.py:16\)"):
        size_of(program, fails=True)


def test_a_program_that_exits_is_told_as_one_that_fails(program: Program) -> None:
    with pytest.raises(UserError, match=r"sys\.exit\(3\)"):
        size_of(program, fails="exit")


def test_an_unknown_setting_is_refused(program: Program) -> None:
    with pytest.raises(UserError, match="one of the program's config"):
        size_of(program, nothing=1)


def test_a_program_that_never_trains_is_told(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("def train(session):\n    pass\n")
    with pytest.raises(UserError, match=r"no session\.backward was called"):
        size_of(Program(tmp_path / "idle.py"))


def test_a_program_that_ends_its_process_ends_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text("import os\n\ndef train(session):\n    os._exit(9)\n")
    with pytest.raises(UserError, match="exit code 9"):
        rehearse_apart(Program(tmp_path / "gone.py"), {})


@pytest.mark.soak
def test_a_rehearsal_has_the_programs_own_arguments(tmp_path: Path) -> None:
    parser = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--width', type=int, default=32)\n"
        "args = parser.parse_args()\n"
    )
    text = "from __future__ import annotations\n" + parser + TWO_LAYERS.replace("32", "args.width")
    (tmp_path / "wide.py").write_text(text)
    program = Program(tmp_path / "wide.py", arguments=("--width", "8"))
    widths = [rehearse_apart(program, config).parameter_bytes / 4 for config in ({}, {"width": 16})]
    assert widths == [8 * width + width + width * 4 + 4 for width in (8, 16)]
