"""The requests of a study and a frontier: their settings, checked, and what became of texts and files among them.

The journal holds a request as plain values, and ``StudyRequest.of_settings`` reads it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from elastune.core.clock import Clock, SystemClock
from elastune.core.cost import ONE_PRICE, UNKNOWN, Prices, check_price
from elastune.core.divergence import check_factor
from elastune.core.errors import UserError
from elastune.core.fields import values_of
from elastune.core.run import CommandLine, ExecutionSettings, Program, StartFrom
from elastune.core.sync_plan import SyncChoice
from elastune.runtime.settings import read_prices
from elastune.tuning.study.settings import (
    CommonSettings,
    FrontierOwnSettings,
    FrontierSettings,
    SearchSettings,
    StudyOwnSettings,
    StudySearchSettings,
    StudySettings,
)

EXACT, FAST = ExecutionSettings(), ExecutionSettings(mode="fast")
DEFAULT_COUNTS = (1, 2, 4, 8)  # the worker counts of a frontier that names neither these nor meshes


@dataclass(frozen=True)
class TrainedProgram:
    """The program to train, and the folder of the results."""

    program: Program
    out: Path


@dataclass(frozen=True, kw_only=True)
class SearchRequest(CommonSettings, SearchSettings, TrainedProgram):
    """The common part of a study and a frontier: trainings whose settings the program's ``space`` chooses.

    Among the values of ``space``, the names of ``trial_results.EXECUTION_PARAMETERS`` set ``execution``. The name
    ``policy`` sets the policies of a trial: "none", the text of a policy, or a list of texts. All other names are
    configuration.

    Attributes:
        execution: The execution settings of a training, unless the space chooses them.
        prices: The prices of worker-hours. A cost is then all paid money; tables show the price of the beginning.
        command: The command line of this request.

    Raises:
        UserError: For an impossible price or divergence factor.
    """

    execution: ExecutionSettings = EXACT
    prices: Prices | None = None
    command: CommandLine | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_price(self.price_per_worker_hour)
        check_factor(self.divergence)


@dataclass(frozen=True, kw_only=True)
class StudyRequest(StudyOwnSettings, StudySearchSettings, SearchRequest):
    """A multi-objective search.

    At least one of ``trials``, ``budget_s``, ``worker_hours`` and ``patience`` must bound it, or the sampler "grid",
    which ends with its last configuration. ``objectives`` (name -> "max" | "min") default to the program's own.

    Attributes:
        sync: The sync strategy, unless the space sets it.
        start_from: The weights with which every trial begins.
        simulated: No trial trains, so its folder cannot go on with trained trials.
    """

    execution: ExecutionSettings = FAST
    sync: SyncChoice = field(default_factory=SyncChoice)
    start_from: StartFrom | None = None
    simulated: bool = False

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any], out: Path) -> StudyRequest:
        """Return the request of the study in ``out`` by the settings in its journal, to resume it.

        Raises ``UserError`` for a journal without a trained search. It also raises for a study with prices, since a
        journal has only their digest.
        """
        if "training_command" in settings:
            rule = "elastune trains no more for a study whose program is a command"
            raise UserError(rule, out, "search on with elastune resume, or begin another study")
        if settings.get("kind") != "tune" or settings.get("simulated") or settings.get("prices") is not None:
            rule = "more is trained in a study of elastune tune, without --prices and not simulated"
            raise UserError(rule, out, "begin another one")
        plain = {each.name: settings[each.name] for each in fields(cls) if each.name in settings}
        data, start_from, bounds = settings.get("data"), settings.get("start_from"), settings.get("trial_workers")
        plain |= {
            "program": Program(
                Path(settings["program"]),
                settings.get("train", "train"),
                None if data is None else Path(data),
                tuple(settings.get("arguments", ())),
            ),
            "out": out,
            "resume": True,
            "execution": ExecutionSettings.from_json(settings["execution"]),
            "sync": SyncChoice.of(settings),
            "start_from": None if start_from is None else StartFrom.from_json(start_from),
            "warm_start": tuple(map(Path, settings.get("warm_start", ()))),
            "constraints": tuple(settings.get("constraints", ())),
            "until": tuple(settings.get("until", ())),
            "monitors": tuple(settings.get("monitors", ())),
            "trial_workers": None if bounds is None else tuple(bounds),
            "plan": None if settings.get("plan") is None else Path(settings["plan"]),
            "command": None,
        }
        return cls(**plain)


@dataclass(frozen=True, kw_only=True)
class FrontierRequest(FrontierOwnSettings, SearchRequest):
    """A frontier: how far the program scales before it loses accuracy, and which settings regain it.

    The program's config must hold ``lr`` and ``batch_size``: the naive rule multiplies both by the worker count.
    ``stopping`` and ``trial_workers`` are for the trainings of the search alone. ``workers`` and ``num_slots`` of
    ``execution`` do not matter: each worker count trains with one slot for each part of its batch. The cost of a row
    is that of its workers for its time, on hosts of unknown kind from the beginning of the frontier on. With
    ``grace_s``, surviving trainings end before the next controller measures step times.

    ``workers`` ascend; counts beyond this machine's are modelled and marked. The search gets at least two fifths of
    ``budget_s``. Each of ``meshes`` is a further row, under the mechanism of ``execution``; if that is "replicated",
    each mesh gets the smallest mechanism that supports it. Each of ``policies`` trains beside static settings, with the
    naive rule's for each worker count, and is a parameter of the search if the space has no ``policy``.
    """


Request = TypeVar("Request", bound=SearchRequest)


def study_request(
    settings: StudySettings,
    program: Program,
    out: Path,
    execution: ExecutionSettings,
    command: CommandLine | None = None,
) -> StudyRequest:
    """Return the request of a study. Raises ``UserError`` for settings that cannot be read.

    Args:
        settings: What a user has written.
        program: The program.
        out: The folder of the results.
        execution: The execution settings of a trial, unless the space chooses them.
        command: The command line.
    """
    request = StudyRequest(
        program,
        out,
        **values_of(CommonSettings, settings),
        **values_of(StudyOwnSettings, settings),
        **values_of(StudySearchSettings, settings),
        execution=execution,
        sync=settings.choice,
        start_from=settings.source,
        command=command,
    )
    return with_prices(request, read_prices(settings, kinds_known=settings.kinds_known), SystemClock())


def frontier_request(
    settings: FrontierSettings,
    program: Program,
    out: Path,
    execution: ExecutionSettings,
    command: CommandLine | None = None,
) -> FrontierRequest:
    """Return the request of a frontier; arguments and errors as of ``study_request``."""
    request = FrontierRequest(
        program,
        out,
        **values_of(CommonSettings, settings),
        **values_of(FrontierOwnSettings, settings),
        execution=execution,
        command=command,
    )
    if not (request.workers or request.meshes):
        request = replace(request, workers=DEFAULT_COUNTS)
    return with_prices(request, read_prices(settings, kinds_known=settings.kinds_known), SystemClock())


def with_prices(request: Request, prices: Prices | None, clock: Clock) -> Request:
    """Return ``request`` with ``prices``, if any. The first price of a host of unknown kind becomes the study's price.

    Raises ``UserError`` for a request that has one price already, and for a price of 0.
    """
    if prices is None:
        return request
    if request.price_per_worker_hour != SearchRequest.price_per_worker_hour:
        raise UserError(ONE_PRICE, "both a price and a file of prices", "leave one of them out")
    first = prices.since(clock.wall()).at(UNKNOWN, 0.0)
    if not first > 0:
        rule = "the first price of a study's workers must be above 0"
        raise UserError(rule, f"{first:g}", "leave --prices out where nothing is paid")
    return replace(request, prices=prices, price_per_worker_hour=first)
