"""The settings of a plan, each declared once: the options of ``elastune plan``, and the keywords of ``find_plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastune.core.fields import COMMON, described, documented, setting
from elastune.core.notation import SIZE, SPEED, TIME
from elastune.core.settings import PriceSettings, ProgramSettings, Settings
from elastune.runtime.settings import ClusterSettings
from elastune.tuning.study.settings import SamplerSettings


@dataclass(frozen=True, kw_only=True)
class PlannedClusterSettings(PriceSettings):
    """The cluster to plan for: its workers, their memory and price, and the deadline."""

    nodes: int = field(metadata=described("Number of nodes, all alike.", panel="Cluster"))
    workers_per_node: int = setting(
        1, "Number of workers that each node has room for.", "--gpus-per-node", panel="Cluster"
    )
    memory_bytes: float | None = setting(
        None,
        "Memory of each worker, such as 24GiB. [default: its share of this machine's]",
        "--memory",
        SIZE,
        panel="Cluster",
    )
    deadline_s: float | None = setting(
        None, "Time that the whole search may take, such as 8h.", "--deadline", TIME, panel="Search"
    )
    device: str | None = setting(
        None,
        "What each worker has: h200, h100, a100, a100-40gb, v100, l40s, l4, a10, t4 or cpu (one core). Times and "
        "memory are then assumed from its data sheet, and nothing is run here. [default: as this machine]",
        metavar="NAME",
        panel="Cluster",
    )
    copies: int = setting(
        1,
        "How many workers hold each part of divided state; memory is counted so. With 2 a lost worker costs no "
        "progress, as in elastune run where nothing is said.",
        panel="Execution",
    )
    link_gbit_s: float = setting(
        10.0, "Speed of the link between nodes, such as 25Gbit/s. It is not measured.", "--link", SPEED, panel="Cluster"
    )
    mesh: str | None = setting(
        None, "Judge only this mesh for a training, such as data=4,tensor=2.", metavar="AXIS=N,...", panel="Execution"
    )


@dataclass(frozen=True, kw_only=True)
class PlannedSearchSettings(SamplerSettings):
    """The search to plan for: its number of trainings, and their loss by running at once."""

    runs: int = setting(
        128, "Number of trainings that the search would need if they ran one after another.", panel="Search"
    )
    crowding: float | None = setting(
        None,
        "Extra trainings that each further training at once costs, as a share of --runs, such as 0.08: proposals that "
        "are made at once know less of one another. [default: from simulated studies]",
        panel="Search",
    )
    variation: float | None = setting(
        None, "Coefficient of variation of the trainings' lengths. [default: from simulated studies]", panel="Search"
    )
    generations: bool = setting(
        False, "The search waits for all trainings of a round, as a genetic search does.", panel="Search"
    )


@dataclass(frozen=True, kw_only=True)
class MeasurementSettings(Settings):
    """The measurements that a plan uses: new ones on this machine or on a cluster, or earlier ones."""

    noise_scale: float | None = setting(
        None, "Gradient noise scale in samples. [default: measured here in a few first steps]", panel="Measurement"
    )
    calibrate_s: float = setting(
        60.0,
        "Time for short runs on this machine, which calibrate the model.",
        "--calibrate",
        TIME,
        panel="Measurement",
    )
    probe: bool = setting(
        False,
        "Calibrate by short runs on one node of --cluster, not on this machine. It needs --out, and --memory or "
        "--device.",
        panel="Measurement",
    )
    measure: int = setting(
        0,
        "Train 12 steps of each of the K best plans that have room on this machine, or on --cluster, and compare them "
        "with the prediction.",
        metavar="K",
        panel="Measurement",
    )
    earlier: Sequence[str | Path] = setting(
        (),
        "Folder of earlier runs. What they measured of FILE on like hardware is not probed again.",
        "--from",
        metavar="FOLDER",
        panel="Measurement",
    )
    top: int = setting(5, "Number of plans to show.", panel="Output and checks")
    out: str | Path | None = setting(
        None,
        "Folder for the plan and the measured runs, which elastune report, explain and --from read. "
        "[default: nothing is kept]",
        metavar="FOLDER",
        panel=COMMON,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "earlier", tuple(map(Path, self.earlier)))


@dataclass(frozen=True, kw_only=True)
class PlanOwnSettings(ProgramSettings, MeasurementSettings, PlannedSearchSettings, PlannedClusterSettings):
    """All settings of a plan but the cluster to measure on."""


@documented
@dataclass(frozen=True, kw_only=True)
class PlanSettings(ClusterSettings, PlanOwnSettings):
    """The settings of a plan: the options of ``elastune plan``, and the keywords of ``elastune.find_plan``.

    Example:
        >>> PlanSettings(nodes=16, workers_per_node=8, memory_bytes=24 * 2**30)
    """
