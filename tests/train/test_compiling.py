"""Compiled models: plain names, times of their own, and code that shapes alone decide."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.sessions import lone_session
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.journal.records import Compiled, Entry, Record, decode, encode
from elastune.core.run import ExecutionSettings
from elastune.report.explain import _compiling
from elastune.train import compiling
from elastune.train.checkpoints.start_from import weights_in
from elastune.train.compiling import is_compiled, plain, too_many_shapes
from elastune.train.models import Prepared
from elastune.train.progress import COMPILED, CompileTimes, StepTimes
from elastune.train.step import WarmedUp, warm_up

COMPILE = {"backend": "eager"}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What exact mode asks of torch's compiler holds for its process: here other tests follow."""
    config = torch._dynamo.config
    before = config.automatic_dynamic_shapes, config.fail_on_recompile_limit_hit
    yield
    config.automatic_dynamic_shapes, config.fail_on_recompile_limit_hit = before
    torch._dynamo.reset()


class Blocks(nn.Module):
    """Two layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x).tanh())
        return result


def whole(model: Blocks) -> nn.Module:
    return torch.compile(model, **COMPILE)


def in_place(model: Blocks) -> nn.Module:
    model.compile(**COMPILE)
    return model


def body_alone(model: Blocks) -> nn.Module:
    model.body = torch.compile(model.body, **COMPILE)
    return model


def both(model: Blocks) -> nn.Module:
    model.body[0] = torch.compile(model.body[0], **COMPILE)
    return torch.compile(model, **COMPILE)


def train(
    out: Path,
    before: Callable[[Blocks], nn.Module] = lambda model: model,
    after: Callable[[Blocks], nn.Module] = lambda model: model,
    **execution: Any,
) -> tuple[str, list[Record]]:
    """The digest of what four slots train, and what was told."""
    results: list[Record] = []
    session = lone_session(
        out, send=results.append, execution=ExecutionSettings(num_slots=4, **execution), checkpoint_every_steps=None
    )
    torch.manual_seed(0)
    model = before(Blocks())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model, optimizer = session.prepare(model, optimizer)
    model = after(model)
    average = session.track("average", AveragedModel(model))
    x = torch.linspace(0, 1, 96).view(24, 4)
    for _ in session.epochs(1):
        for one, other in session.batches(TensorDataset(x, x.sum(1, keepdim=True)), 8):
            session.backward(mse_loss(model(one), other), model)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    session.finish()
    assert session.trained is not None
    return session.trained.fingerprint(session.state.workers), results


@pytest.fixture(scope="module")
def uncompiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(tmp_path_factory.mktemp("uncompiled"))[0]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", [whole, in_place, body_alone, both])
def test_names_are_plain_and_bits_are_those_without(
    tmp_path: Path, when: str, how: Callable[[Blocks], nn.Module], uncompiled: str
) -> None:
    digest, outcome = train(tmp_path, **{when: how})
    assert digest == uncompiled, "eagerly run code is what it was"
    assert any(isinstance(record, Compiled) and record.seconds > 0 for record in outcome), "it did compile"
    with weights_in(tmp_path) as (result, _):
        assert sorted(result) == sorted(Blocks().state_dict())
    state = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert state
    assert b"_orig_mod" not in state


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", [whole, in_place])
def test_autocast_of_the_run_reaches_into_compiled_code(
    tmp_path: Path, when: str, how: Callable[[Blocks], nn.Module], uncompiled: str
) -> None:
    plainly, _ = train(tmp_path / "plainly", precision="bf16")
    assert plainly != uncompiled
    digest, _ = train(tmp_path / "compiled", **{when: how}, precision="bf16")
    assert digest == plainly


def test_what_is_compiled_inside_still_runs_so() -> None:
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        seen.append(len(inputs))
        return graph.forward

    model = Blocks()
    model.body = torch.compile(model.body, backend=backend)
    assert is_compiled(model)
    result = plain(model)
    assert result is model
    assert type(model.body) is nn.Sequential
    model(torch.rand(3, 4))
    assert len(seen) == 1
    assert is_compiled(result)
    other = copy.deepcopy(result)
    assert not is_compiled(other), "a copy does not run with the weights of the first"


def test_a_step_that_compiles_is_in_no_times(tmp_path: Path) -> None:
    from elastune.core.clock import SystemClock

    times = StepTimes(SystemClock())
    for number in range(8):
        torch._dynamo.reset()
        times.begin_step()
        if number in (4, 6):
            torch.compile(nn.Linear(2, 2), **COMPILE)(torch.rand(1, 2))
        result = times.end_step(0.0, 0.0)
        assert (result.data_s < 0) == (number in (4, 6))
    assert len(times._kept) == 8 - 3 - 2
    times.leave_out_newest()
    assert len(times._kept) == 8 - 3 - 3
    assert COMPILED.unreported() > 0
    assert COMPILED.unreported() == 0
    assert times.count == 8


def test_passes_that_do_not_count_are_listened_to() -> None:
    from torch._dynamo.callback import callback_handler

    callback_handler.clear()
    nothing: Any = None
    with pytest.raises(WarmedUp):
        next(warm_up(nothing, iter(()), nothing, nothing, nothing, nothing))
    assert callback_handler.start_callbacks == [COMPILED._begins]


def test_a_worker_that_waited_for_a_compiler_leaves_the_step_out(tmp_path: Path) -> None:
    from elastune.adapt.monitors.base import UNKNOWN_TIMES

    session = lone_session(tmp_path)
    adapter, times = session._parts.adapter, session._parts.progress.times
    for _ in range(5):
        times.begin_step()
        times.end_step(0.0, 0.0)
    control = adapter.contribute(UNKNOWN_TIMES)
    assert list(control.times) == [-1.0] * 3
    from elastune.parallel.sync.base import STATISTICS, step_statistics
    from elastune.train.data.source import StepPlan

    plan = StepPlan(offset=0, size=8, length=8, slices=[], contributors=1, workers=1, checksum=0)
    adapter.step_reduced(control, 0.0, plan, step_statistics([0.0] * len(STATISTICS), None))
    assert len(times._kept) == 1


def test_shapes_alone_decide_in_exact_mode_and_too_many_are_refused(tmp_path: Path) -> None:
    torch._dynamo.config.recompile_limit, before = 2, torch._dynamo.config.recompile_limit
    try:
        train(tmp_path / "few", whole)  # slots of two, and eight in all
        assert torch._dynamo.config.automatic_dynamic_shapes is False
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit) as caught:
            model = torch.compile(nn.Linear(2, 2), **COMPILE)
            for size in range(2, 6):
                model(torch.rand(size, 2))
    finally:
        torch._dynamo.config.recompile_limit = before
    result = too_many_shapes(caught.value)
    assert isinstance(result, UserError)
    assert "more than" in str(result)
    assert too_many_shapes(ValueError("another")) is None


@pytest.mark.parametrize("how", [whole, in_place, body_alone])
def test_divided_models_are_not_compiled(how: Callable[[Blocks], nn.Module]) -> None:
    model = how(Blocks())
    given = Prepared.of([model, torch.optim.SGD(model.parameters(), 0.1)])
    given.check("replicated")
    with pytest.raises(UserError, match="compiled model"):
        given.check("sharded")
    Prepared.of([Blocks(), torch.optim.SGD(model.parameters(), 0.1)]).check("sharded")


def test_weights_of_a_compiled_model_fit_the_plain_one(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(whole(Blocks()).state_dict()), tmp_path / "model.safetensors")
    with weights_in(tmp_path / "model.safetensors") as (result, _):
        assert sorted(result) == sorted(Blocks().state_dict())


def test_it_is_explained() -> None:
    records = [Compiled(1, 0, 2.0), Compiled(1, 1, 3.0), Compiled(9, 0, 0.5)]
    assert [decode(encode(record)) for record in records] == records
    lines = _compiling([Entry(float(at), record) for at, record in enumerate(records)])
    result = "steps that it did so in are not in the times of steps."
    assert lines == (
        f"Worker 0 compiled for 2.5 s, the last time up to step 9; {result}",
        f"Worker 1 compiled for 3 s, the last time up to step 1; {result}",
    )


def test_a_process_that_never_compiles_imports_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(compiling.sys.modules, "torch._dynamo")
    times = CompileTimes()
    assert times.unreported() == 0
    model = Blocks()
    assert plain(model) is model
    assert not is_compiled(model)
    assert "torch._dynamo" not in compiling.sys.modules


def test_a_step_of_a_compiled_program_is_told_as_that_of_the_plain_one(tmp_path: Path) -> None:
    from elastune.core.run import Program
    from elastune.train.program.load import load
    from elastune.train.rehearsal import rehearse

    lines = (
        "import torch",
        "config = {'compiled': True}",
        "def train(session):",
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))",
        "    optimizer = torch.optim.Adam(model.parameters())",
        "    model = torch.compile(model, backend='eager') if session.config['compiled'] else model",
        "    model, optimizer = session.prepare(model, optimizer)",
        "    for _ in session.epochs(1):",
        "        for (x,) in session.batches(torch.utils.data.TensorDataset(torch.rand(16, 4)), 8):",
        "            session.backward(model(x).square().mean(), more=True)",
        "            session.backward(model(x).mean())",
        "            optimizer.step()",
    )
    program = Program(tmp_path / "program.py")
    program.path.write_text("\n".join(lines) + "\n")
    result = rehearse(load(program), program, {})
    assert result == rehearse(load(program), program, {"compiled": False})
    assert result.fake
