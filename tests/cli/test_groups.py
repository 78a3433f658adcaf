"""Groups of options: each field is an option of its own, and each group checks what it is given."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from elastune.cli import groups, options
from elastune.cli.flatten import flatten
from elastune.core.cost import check_price
from elastune.core.errors import UserError


@dataclass(frozen=True)
class Tools:
    hammer: Annotated[int, typer.Option(help="How heavy.")] = 1
    out: options.Out = None


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


def test_slots_suffice_for_all_workers() -> None:
    def slots(workers: int, slots: int | None, most: int | None = None) -> int:
        return groups.ExecutionOptions(slots=slots, device="cpu").execution(workers, most).num_slots

    assert [slots(1, None), slots(8, None), slots(12, None), slots(2, 4), slots(2, None, 16)] == [1, 8, 12, 4, 16]


@pytest.mark.parametrize("price", [0, -1, float("nan"), float("inf")])
def test_a_price_is_positive(price: float) -> None:
    with pytest.raises(UserError, match="price of a worker-hour must be above 0"):
        check_price(price)


def test_modes_that_commands_begin_with() -> None:
    assert (
        groups.ExecutionOptions(device="cpu").execution(1).mode,
        groups.FastExecutionOptions(device="cpu").execution(1).mode,
    ) == (
        "exact",
        "fast",
    )
