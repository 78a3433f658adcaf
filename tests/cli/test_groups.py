"""Groups of options: each field is an option of its own, and each group checks what it is given."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from elastune.cli import groups
from elastune.cli.groups import flatten
from elastune.core.cost import check_price
from elastune.core.errors import UserError
from elastune.core.settings import OutSettings


@dataclass(frozen=True)
class Tools(OutSettings):
    hammer: Annotated[int, typer.Option(help="How heavy.")] = 1


@dataclass(frozen=True)
class HeavyTools(Tools):
    hammer: Annotated[int, typer.Option(help="How heavy.")] = 9


@pytest.mark.parametrize(
    ("kind", "arguments", "heavy"), [(Tools, [], 1), (HeavyTools, [], 9), (Tools, ["--hammer", "5"], 5)]
)
def test_fields_are_options_with_the_defaults_of_their_group(kind: type, arguments: list[str], heavy: int) -> None:
    seen: list[tuple[str, Tools]] = []

    def build(file: str, tools: Tools, often: int = 2) -> int:
        """Build FILE."""
        seen.append((file, tools))
        return often

    build.__annotations__["tools"] = kind
    app = typer.Typer()
    app.command()(flatten(build))
    shown = CliRunner().invoke(app, ["--help"])
    assert "Build FILE." in shown.output
    assert "How heavy." in shown.output
    ran = CliRunner().invoke(app, ["house", *arguments])
    assert ran.exit_code == 0, ran.output
    assert seen == [("house", kind(hammer=heavy))]


def test_an_option_without_a_default_is_required() -> None:
    @dataclass(frozen=True)
    class Needed:
        nail: Annotated[str, typer.Option()]

    def build(needed: Needed) -> int:
        return 0

    build.__annotations__["needed"] = Needed
    app = typer.Typer()
    app.command()(flatten(build))
    assert CliRunner().invoke(app, []).exit_code == 2
    assert CliRunner().invoke(app, ["--nail", "long"]).exit_code == 0


def options_of(kind: Any, *words: str) -> groups.ExecutionOptions:
    """What a command that takes ``kind`` makes of the words of a command line."""
    seen: list[groups.ExecutionOptions] = []

    def build(execution_options: groups.ExecutionOptions) -> int:
        seen.append(execution_options)
        return 0

    build.__annotations__["execution_options"] = kind
    app = typer.Typer()
    app.command()(flatten(build))
    ran = CliRunner().invoke(app, ["--device", "cpu", *words])
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return seen[0]


def test_slots_suffice_for_all_workers() -> None:
    def slots(workers: int, *words: str, most: int | None = None) -> int:
        return options_of(groups.Execution, *words).execution(workers, most).num_slots

    assert [slots(1), slots(8), slots(12), slots(2, "--slots", "4"), slots(2, most=16)] == [1, 8, 12, 4, 16]


@pytest.mark.parametrize(
    ("option", "rule"), [("--slots", "at least one slot"), ("--virtual-tensor", "virtual blocks must be from 1")]
)
def test_a_number_that_is_left_open_is_no_zero(option: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        options_of(groups.Execution, option, "0")


def test_options_that_are_left_out_follow_from_the_mesh() -> None:
    execution = options_of(groups.Execution, "--mesh", "data=2,tensor=2").execution(None)
    assert (execution.workers, execution.mechanism, execution.virtual_tensor) == (4, "tensor", 4)
    given = options_of(groups.Execution, "--mechanism", "zero", "--topology", "tree").execution(2)
    assert (given.mechanism, str(given.topology)) == ("zero", "tree")


@pytest.mark.parametrize("price", [0, -1, float("nan"), float("inf")])
def test_a_price_is_positive(price: float) -> None:
    with pytest.raises(UserError, match="price of a worker-hour must be above 0"):
        check_price(price)


def test_modes_that_commands_begin_with() -> None:
    kinds = (groups.Execution, groups.WorkerExecution, groups.FastExecution)
    assert [options_of(kind).on(1).mode for kind in kinds] == ["exact", "exact", "fast"]
