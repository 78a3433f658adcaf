"""The settings that runs, studies, frontiers and plans share, in groups. Each setting is declared here once.

A field has the name of the keyword in Python, its type, its default, its help text, and how a command line writes it
(``core/fields.py``). Names that end in ``_s`` are seconds. ``runtime/settings.py`` adds the settings of a run,
``tuning/study/settings.py`` those of a study and a frontier, ``tuning/cluster_plan/settings.py`` those of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastune.core.checkpoint_keeping import KEEP_CHECKPOINTS, KeepCheckpoints
from elastune.core.cost import ON_DEMAND
from elastune.core.divergence import FACTOR
from elastune.core.errors import UserError
from elastune.core.fields import COMMON, OUTPUT, check_types, described, setting, settle_sequences
from elastune.core.notation import CONFIG, FACTOR_OR_OFF, LONGEST_S, NAMED, TIME
from elastune.core.run import Config, Elastic, StartFrom, parse_renames
from elastune.core.slots import VERIFY, VerifyPlan
from elastune.core.sync_plan import SyncChoice, SyncPlan


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The base of all groups of settings: a list becomes a tuple, and one text in place of several a tuple of one.

    Raises:
        UserError: For a value of another type than its field's.
    """

    def __post_init__(self) -> None:
        settle_sequences(self)
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class ProgramSettings(Settings):
    """The program's own settings, and the seed."""

    config: Config = field(
        default_factory=dict,
        kw_only=False,
        metadata=described(
            "Override a value of the program's config, such as lr=0.01, or optim.lr=0.01 of a nested one. May be "
            "repeated.",
            "--set",
            CONFIG,
            panel=COMMON,
        ),
    )
    seed: int = setting(0, "Seed for everything that is random.", panel=COMMON)

    def __post_init__(self) -> None:
        if not isinstance(self.config, Mapping | None):
            raise UserError("config must be a dict", repr(self.config)[:100], 'such as config={"lr": 0.1}')
        object.__setattr__(self, "config", dict(self.config or {}))  # a copy; None is no config, too
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ProgramSettings):
    """The program's settings, how long a training is, and when it counts as failed."""

    epochs: int | None = setting(
        None,
        "Number of epochs (passes over the data), instead of what the program passes to session.epochs.",
        panel=COMMON,
    )
    divergence: float | None = setting(
        FACTOR,
        "End a training as failed when its loss stays above FACTOR times the loss at its start. A loss that is not "
        "finite always fails; with off, nothing else does.",
        notation=FACTOR_OR_OFF,
        panel="Training",
    )


@dataclass(frozen=True, kw_only=True)
class ProofSettings(Settings):
    """What is proved before a training goes on."""

    unchecked: bool = setting(
        False,
        "Do not prove in the first step that several slots train as one pass a batch: that the loss is a mean, with "
        "the same gradient on all workers.",
        panel="Training",
    )


@dataclass(frozen=True, kw_only=True)
class VerifySettings(Settings):
    """Whether slots are computed by a second worker, too."""

    verify: str | None = setting(
        None,
        "In every so many steps let a second worker compute a slot, too (exact mode): a worker that computes wrong is "
        "named and leaves, and training goes back to a good state. See docs/verify.md. [default: never]",
        notation=VERIFY,
        panel="Training",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify is not None:
            VerifyPlan.parse(self.verify)

    @property
    def verify_plan(self) -> VerifyPlan | None:
        """The parsed ``verify``."""
        return None if self.verify is None else VerifyPlan.parse(self.verify)


@dataclass(frozen=True, kw_only=True)
class OutSettings(Settings):
    """The folder of results."""

    out: str | Path | None = setting(
        None,
        "Folder for the journal, logs and report, or a URL that fsspec can open, such as s3://bucket/run. "
        "[default: the next free elastune-out/NAME-COMMAND-N]",
        metavar="FOLDER|URL",
        panel=COMMON,
    )


@dataclass(frozen=True, kw_only=True)
class LoggerSettings(Settings):
    """Where results are logged beside the journal."""

    log: Sequence[str] = setting(
        (),
        "Log metrics, settings, decisions, workers and artifacts to csv, tensorboard, mlflow or wandb, such as "
        '"mlflow:experiment=digits". May be repeated. See docs/trackers.md.',
        metavar=NAMED,
        panel=OUTPUT,
    )


@dataclass(frozen=True, kw_only=True)
class ResumeSettings(Settings):
    """How a command continues what its output folder holds."""

    resume: bool = setting(
        False, "Continue what is in --out. With nothing there, start from the beginning.", panel=COMMON
    )
    accept_changes: bool = setting(
        False,
        "With --resume: go on though the program, its space or the data have changed, and say so in the report.",
        panel="Training",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Settings):
    """The checkpoints of a training."""

    keep_checkpoints: str = setting(
        str(KeepCheckpoints()),
        "Checkpoints that stay when newer ones come: the newest N (last), those after a multiple of so many steps "
        "(every), the best by a reported metric (best:accuracy, or best:loss:min). The newest always stays.",
        notation=KEEP_CHECKPOINTS,
        panel="Training",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        KeepCheckpoints.parse(self.keep_checkpoints)


@dataclass(frozen=True, kw_only=True)
class TimeoutSettings(Settings):
    """How long workers wait for one another."""

    collective_timeout_s: float = setting(
        Elastic.collective_timeout_s,
        "How long workers wait for a worker that is alive but does not take part in an exchange.",
        "--collective-timeout",
        TIME,
        panel="Cluster",
    )


@dataclass(frozen=True, kw_only=True)
class WaitSettings(TimeoutSettings):
    """How long workers wait for one another, and for the command that started them."""

    grace_s: float = setting(
        Elastic.grace_s,
        "How long workers train on if this command dies, such as 60s. The same command with --resume takes them over. "
        "[default: they do not]",
        "--grace",
        TIME,
        panel="Cluster",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.grace_s <= LONGEST_S:  # nor NaN
            raise UserError("grace_s must be from 0 to a year, in seconds", self.grace_s, "such as 60.0")


@dataclass(frozen=True, kw_only=True)
class SyncSettings(Settings):
    """The sync strategy: how workers agree on the weights."""

    sync: str = setting(
        SyncPlan.strategy,
        "When workers exchange what they have learned. allreduce: gradients, in every step. "
        "local:learners=8,every=16: 8 learners take 16 steps of their own each, then become their mean. diloco, "
        "averaging, gossip, pair_averaging and parameter_server are written likewise. The strategy shows in the "
        "result; the number of workers does not. See docs/sync.md.",
        panel="Training",
    )
    sync_schedule: str = setting(
        "",
        "Other strategies for --sync from given steps on, such as '1000=local:learners=8,every=16; 5000=allreduce'.",
        panel="Training",
    )

    @property
    def choice(self) -> SyncChoice:
        """The sync strategy and its schedule. Raises ``UserError``."""
        return SyncChoice.parse(self.sync, self.sync_schedule)

    @property
    def learners(self) -> int:
        """The number of learners; the number of slots must be a multiple of it. Raises ``UserError``."""
        return self.choice.slots(1)


@dataclass(frozen=True, kw_only=True)
class WeightSettings(Settings):
    """The weights of another model that a training begins with."""

    start_from: str | Path | None = setting(
        None,
        "Begin with those weights that fit of a run's folder, a trial's folder or a safetensors file. See "
        "docs/transfer.md.",
        metavar="SOURCE",
        panel="Training",
    )
    rename: Sequence[str] = setting(
        (),
        "Beginning of tensors' names in SOURCE, and what it is here: backbone.=encoder. May be repeated.",
        metavar="THERE=HERE",
        panel="Training",
    )
    fresh: Sequence[str] = setting(
        (),
        "Tensors that are not taken from SOURCE, such as 'head.*'. May be repeated.",
        metavar="PATTERN",
        panel="Training",
    )

    @property
    def source(self) -> StartFrom | None:
        """The source of the weights; None without ``start_from``. Raises ``UserError``, also for a missing source."""
        if self.start_from is None:
            if self.rename or self.fresh:
                raise UserError("--rename and --fresh are of --start-from", "none", "add --start-from SOURCE")
            return None
        path = Path(self.start_from)
        if not path.exists():
            fix = "name the folder of a run or a trial, or a safetensors file"
            raise UserError("--start-from must be there", path, fix)
        return StartFrom(path.resolve(), parse_renames(tuple(self.rename)), tuple(self.fresh))


@dataclass(frozen=True, kw_only=True)
class MonitorSettings(Settings):
    """What is measured while a training goes on."""

    monitors: Sequence[str] = setting(
        (),
        'Something to measure during training, such as "noise_scale:every=10". May be repeated.',
        "--monitor",
        metavar=NAMED,
        panel="Training",
    )


@dataclass(frozen=True, kw_only=True)
class PriceSettings(Settings):
    """The price of a worker-hour."""

    price_per_worker_hour: float = setting(
        1.0, "Price of a worker-hour in dollars. At 1, a cost is the number of worker-hours.", "--price", panel="Cost"
    )


@dataclass(frozen=True, kw_only=True)
class PriceTableSettings(Settings):
    """The prices of worker-hours in a file."""

    prices: str | Path | None = setting(
        None,
        "CSV file of what a worker-hour costs on each kind of host, with the columns kind,price or time,kind,price. "
        "See docs/spot.md.",
        metavar="FILE",
        panel="Cost",
    )


@dataclass(frozen=True, kw_only=True)
class PriceFileSettings(PriceTableSettings):
    """The prices of worker-hours in a file, by the kind of the host and over time."""

    kind: str = setting(
        ON_DEMAND,
        "With --prices: the kind, such as spot, of hosts that do not tell theirs. This machine is one of these.",
        panel="Cost",
    )
