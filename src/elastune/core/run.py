"""What a run is: the program, its hyperparameters and seed, and the settings by which it is executed.

``RunSpec`` holds everything that decides a run, and ``ExecutionSettings`` holds the execution settings: in ``exact``
mode they never change the result. The file also has the rules for a resumed run's settings, for sync strategies and for
initial weights, and the derivation of seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from elastune.core.checkpoint_keeping import KeepCheckpoints
from elastune.core.command import TrainingCommand
from elastune.core.communication import Compression, Topology
from elastune.core.divergence import Divergence
from elastune.core.errors import UserError
from elastune.core.fields import COMMON, Notation, check_types, documented, setting
from elastune.core.mesh import MechanismName, Mesh
from elastune.core.slots import Mode, VerifyPlan
from elastune.core.sync_plan import MOST_STEP, SyncPlan, SyncSchedule

# The weights that a training begins with.


@dataclass(frozen=True)
class StartFrom:
    """The model whose weights a training begins with.

    Attributes:
        source: The folder of a run or a trial, whose newest checkpoint is read, or a safetensors file.
        rename: Pairs of beginnings of tensor names, in the source and in this model. The first pair that fits counts.
        fresh: Names in this model that keep their initial values, with ``*`` for anything, such as "head.*".
        sha256: The digest that the source must have, so that all trials of a study begin alike; "" for any.

    Example:
        >>> start = StartFrom(Path("pretrained"), rename=(("backbone.", "encoder."),), fresh=("head.*",))
        >>> start.renamed("backbone.0.weight")
        'encoder.0.weight'
    """

    source: Path
    rename: tuple[tuple[str, str], ...] = ()
    fresh: tuple[str, ...] = ()
    sha256: str = ""

    def renamed(self, name: str) -> str:
        """Return the name in this model of the source's tensor ``name``."""
        for begins, instead in self.rename:
            if name.startswith(begins):
                return instead + name[len(begins) :]
        return name

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        rename = [list(pair) for pair in self.rename]
        return {"source": str(self.source), "rename": rename, "fresh": list(self.fresh), "sha256": self.sha256}

    @classmethod
    def from_json(cls, data: Any) -> StartFrom:
        """Return what ``to_json`` described. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
        rename = tuple((str(begins), str(instead)) for begins, instead in data["rename"])
        return cls(Path(data["source"]), rename, tuple(map(str, data["fresh"])), str(data["sha256"]))


def parse_renames(texts: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the pairs that ``--rename`` names, such as "backbone.=encoder.". Raises ``UserError``."""
    renames = []
    for text in texts:
        begins, equals, instead = text.partition("=")
        if not equals or "=" in instead:
            raise UserError("a rename is THERE=HERE, the beginnings of names", repr(text)[:80], "backbone.=encoder.")
        renames.append((begins, instead))
    return tuple(renames)


# The parts of a run: the program, its hyperparameters and seed, and the execution settings.

Precision = Literal["fp32", "bf16"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
Scalar = bool | int | float | str
DEFAULT_VIRTUAL_TENSOR = 4  # where layers are divided; more workers along that axis raise it
ConfigValue = Scalar | None | list["ConfigValue"]
Config = dict[str, ConfigValue]
ProgramSource = dict[str, dict[str, str]]
"""Digests of a program's statements by file and part (``train.program.source``); empty: not known."""


def number(config: Config, name: str) -> float:
    """Return the numeric setting ``name``.

    Raises:
        KeyError: Where the setting is missing.
        TypeError: Where its value is not a number.
    """
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return value


@dataclass(frozen=True)
class Program:
    """A Python file of the user, and its training function.

    Attributes:
        path: The file.
        train: The name of the training function.
        data: The folder of the program's data sets; None: the user gave none.
        arguments: The program's own command line, which it reads from ``sys.argv[1:]``.
        command: The command that trains, instead of a function; ``path`` then is the file of the search space.
    """

    path: Path
    train: str = "train"
    data: Path | None = None
    arguments: tuple[str, ...] = ()
    command: TrainingCommand | None = None

    @property
    def data_text(self) -> str | None:
        """``data`` as a journal holds it."""
        return None if self.data is None else str(self.data)


def _mesh(text: str, option: str) -> Mesh:
    return Mesh.parse(text)


def _topology(text: str, option: str) -> Topology:
    return Topology.parse(text)


MESH = Notation("AXIS=N,...", _mesh)
TOPOLOGY = Notation("NAME|parents=[...]", _topology, str)
LEAST = "least"  # of a mechanism: what the mesh needs
WHOLE = ("num_slots", "copies", "virtual_tensor", "zero_stage", "bucket_bytes")
OPEN = (
    "workers",
    "mechanism",
    "num_slots",
    "virtual_tensor",
)  # execution settings that others decide where they are left out


@documented
@dataclass(frozen=True)
class ExecutionSettings:
    """How a training is executed: workers, layout, mechanism and device. They set its speed and its cost.

    In ``exact`` mode only ``num_slots``, ``virtual_tensor``, ``precision`` and ``threads`` change the result.
    ``compress``, which is for ``fast`` mode, changes it, too. ``num_slots`` and ``virtual_tensor`` belong to the run,
    and stay when workers change.

    ``workers=0``, ``num_slots=0``, ``virtual_tensor=0`` and ``mechanism="least"`` are the defaults: they leave the
    setting to the mesh and to other settings. An object holds what these have decided. The command line has no 0: leave
    the option out.

    Example:
        >>> elastune.run(train, {"lr": 0.1}, execution=elastune.ExecutionSettings(mode="fast", micro_batch=64))
    """

    workers: int = setting(0, "Worker processes at the beginning. 0: those of the mesh, or 1.", panel=COMMON)
    mode: Mode = setting(
        "exact",
        "exact: the same weights for any number of workers; fast: weights that are equal within rounding.",
        panel="Execution",
    )
    mechanism: str = setting(
        LEAST,
        "How a copy of the model lies on workers: replicated, zero or sharded. Join it with tensor or pipeline to "
        "divide the layers, too, such as pipeline+zero. Or a package does it all: fsdp2, deepspeed, fairscale, "
        "horovod. least is the least that --mesh needs. See docs/meshes.md. [default: least]",
        metavar="NAME[+NAME...]",
        panel="Execution",
    )
    num_slots: int = setting(
        0,
        "Number of equal shares that each global batch is cut into. It shows in the result. No run has more workers "
        "than slots. [default: as many as the command allows workers, so 1 where it names none]",
        "--slots",
        panel="Execution",
    )
    threads: int = setting(1, "CPU threads of each worker.", panel="Execution")
    device: str = setting("cpu", "Where to compute: auto, cpu, cuda or cuda:N.", panel="Execution")
    precision: Precision = setting("fp32", "fp32, or bf16 (autocast in the forward pass).", panel="Execution")
    micro_batch: int | None = setting(None, "Most samples in one forward pass. [default: no limit]", panel="Execution")
    mesh: Mesh | None = setting(
        None,
        "Arrange the workers of a training as a grid, which also sets their number: data=2,tensor=2 has 4. Axes: data, "
        "shard, tensor, pipeline. See docs/meshes.md.",
        notation=MESH,
        panel="Execution",
    )
    copies: int | None = setting(
        None,
        "How many workers hold each part of divided state. [default: 2 where workers may change, else 1]",
        panel="Execution",
    )
    virtual_tensor: int = setting(
        0,
        "Number of blocks that mechanism tensor divides a layer into, whatever the mesh. It shows in the result. "
        f"[default: {DEFAULT_VIRTUAL_TENSOR}, or as many as workers]",
        panel="Execution",
    )
    schedule: Schedule = setting(
        "1f1b", "Order of passes in mechanism pipeline: 1f1b, gpipe, interleaved or zero-bubble.", panel="Execution"
    )
    offload: bool = setting(
        False, "Keep optimizer state in the CPU's memory. Needs --mechanism zero or sharded.", panel="Execution"
    )
    zero_stage: int | None = setting(
        None,
        "What mechanism deepspeed or fairscale divides: 0 nothing, 1 optimizer state, 2 also gradients, 3 also "
        "parameters. fairscale has stage 2 alone. [default: 2]",
        panel="Execution",
    )
    compress: str | None = setting(
        None,
        "Compress gradients before they are sent: bf16, fp16, int8, powersgd:rank=4 or topk:ratio=0.01. Needs --mode "
        "fast, and shows in the result. See docs/compression.md.",
        metavar="HOW",
        panel="Execution",
    )
    topology: Topology = setting(
        Topology(),
        "Routes by which sums travel between workers: auto, native, ring, tree, binary_tree, star, hierarchical, or "
        "parents=[0,0,1,0] with the parent of each rank. :chunk_kib=N at the end sets the size of the chunks that are "
        "sent, in KiB. See docs/topologies.md.",
        notation=TOPOLOGY,
        panel="Execution",
    )
    bucket_bytes: int | None = setting(
        None,
        "Most bytes of gradients in one message between replicated workers. [default: 16 MiB, the first 1 MiB]",
        panel="Execution",
    )

    @property
    def cuts_batches(self) -> bool:
        """Whether a worker may get a global batch in several parts, one after another."""
        return self.micro_batch is not None or (self.mode == "exact" and self.num_slots > 1)

    def __post_init__(self) -> None:
        self._check_types()
        name = MechanismName.minimal_for(self.mesh, self.virtual_tensor or None)
        if self.mechanism != LEAST:
            name = MechanismName.parse(self.mechanism)
        workers = self.workers or (1 if self.mesh is None else self.mesh.workers)
        blocks = self.virtual_tensor
        if not blocks:
            alone = workers if name.dividing == ("tensor",) else 1
            blocks = max(DEFAULT_VIRTUAL_TENSOR, alone if self.mesh is None else self.mesh.tensor) if name.tensor else 1
        slots = self.num_slots or (
            self.mesh.batch if self.mesh is not None else 1 if name.tensor or name.pipeline else workers
        )
        compression = None if self.compress is None else Compression.parse(self.compress)
        compress = None if compression is None else str(compression)
        left_open = {each for each in OPEN if vars(self)[each] == getattr(ExecutionSettings, each)}
        object.__setattr__(self, "_left_open", left_open)  # no field: equal settings may have been written otherwise
        settled: dict[str, Any] = {"mechanism": str(name), "workers": workers, "num_slots": slots}
        settled |= {"virtual_tensor": blocks, "compress": compress}
        if isinstance(topology := vars(self)["topology"], str):
            settled["topology"] = Topology.parse(topology)
        for name_, value in settled.items():
            object.__setattr__(self, name_, value)

    def _check_types(self) -> None:
        """Refuse values of other types, which a program, its space or a journal may have."""
        raw = vars(self)
        for name in WHOLE:
            value = raw[name]
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise UserError(f"{name} must be a whole number", repr(value), f"for example {name}=2")
        for name, kind, rule, fix in (
            ("mesh", Mesh | None, "a mesh must be a Mesh", "use elastune.Mesh(data=2, shard=2)"),
            ("topology", Topology | str, "a topology must be a text", 'such as "tree"'),
            ("mechanism", str, "a mechanism must be a text", 'such as "tensor+zero"'),
            ("compress", str | None, "a compression must be a text", 'such as "powersgd:rank=4"'),
        ):
            if not isinstance(raw[name], kind):
                raise UserError(rule, repr(raw[name])[:100], fix)
        check_types(self, without=(*WHOLE, "mesh", "topology", "mechanism", "compress"))

    @property
    def chosen(self) -> dict[str, Any]:
        """The values that were given, by name: all but those of ``OPEN`` that were left out. ``replace`` gives all.

        Example:
            >>> "num_slots" in ExecutionSettings(mode="fast").chosen
            False
        """
        return {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in vars(self)["_left_open"]
        }

    @property
    def parts(self) -> MechanismName:
        """The parsed name of the mechanism."""
        return MechanismName.parse(self.mechanism)

    @property
    def compression(self) -> Compression | None:
        """The parsed ``compress``; None: no compression."""
        return None if self.compress is None else Compression.parse(self.compress)

    @property
    def first_mesh(self) -> Mesh:
        """The mesh at the beginning: ``mesh``, or the mesh that the mechanism makes of ``workers``.

        Raises:
            UserError: Where the mechanism divides along several axes and ``mesh`` does not give the workers along each.
        """
        return self.parts.mesh(self.workers) if self.mesh is None else self.mesh

    def on(self, workers: int) -> ExecutionSettings:
        """Return the same settings with as many whole replicas as ``workers`` can hold.

        If they cannot hold one, all workers are along the mechanism's axis.
        """
        mesh = None if self.mesh is None else self.mesh.fitted(workers)
        return replace(self, workers=workers if mesh is None else mesh.workers, mesh=mesh)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a journal, without those that do not apply to this mechanism."""
        parts, plain = self.parts, {f.name: getattr(self, f.name) for f in fields(self)}
        plain["mesh"] = None if self.mesh is None else str(self.mesh)
        plain["topology"] = str(self.topology)
        silent = {
            "mesh": self.mesh is None,
            "copies": self.copies is None,
            "virtual_tensor": self.virtual_tensor == 1 and not parts.tensor,
            "schedule": self.schedule == ExecutionSettings.schedule and not parts.pipeline,
            "offload": not self.offload,
            "zero_stage": self.zero_stage is None,
            "compress": self.compress is None,
            "topology": self.topology == Topology(),
            "bucket_bytes": self.bucket_bytes is None,
        }
        return {name: value for name, value in plain.items() if not silent.get(name, False)}

    def with_values(self, values: Mapping[str, Any]) -> ExecutionSettings:
        """Return these settings with ``values`` in place of some. None opens one of ``OPEN`` again."""
        opened = {name: getattr(ExecutionSettings, name) for name in OPEN if name in values and values[name] is None}
        return replace(self, **{**values, **opened})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ExecutionSettings:
        """Return the settings that ``to_json`` gave, from a journal or another process.

        Raises:
            TypeError: For a name that is no execution setting.
            UserError: For a text that is no mesh or mechanism.
        """
        mesh = values.get("mesh")
        if not isinstance(mesh, str | None):
            raise UserError("a mesh must be a text", repr(mesh)[:100], 'such as "data=2,shard=2"')
        known = {name: value for name, value in values.items() if value is not None or name not in OPEN}
        return cls(**{**known, "mesh": mesh if mesh is None else Mesh.parse(mesh)})


@dataclass(frozen=True)
class Elastic:
    """How the workers of a run may change while it trains.

    Attributes:
        low: The fewest workers.
        high: The most workers; None: as many as the run began with.
        heartbeat_s: A worker that is silent for so many seconds counts as lost.
        most_losses: A run has failed once it lost workers so many times without progress in between. Progress is a step
            that survives, a later checkpoint or a report.
        collective_timeout_s: Seconds that workers wait for one that lives but does not come to a reduction or gather.
            Then the run ends and names the missing worker.
        grace_s: Seconds that workers train without a controller and look for the next one; 0: they end with it.
    """

    low: int = 1
    high: int | None = None
    heartbeat_s: float = 5.0
    most_losses: int = 8
    collective_timeout_s: float = 1800.0  # as torch's own on gloo
    grace_s: float = 0.0


@dataclass(frozen=True)
class Adapt:
    """The monitors and policies of a run.

    Attributes:
        policies: Texts as for ``--policy``, "gns:max_batch=2048"; in order.
        monitors: Texts as for ``--monitor``, "noise_scale" or "noise_scale:every=10", in addition to those that
            policies need.

    Example:
        >>> Adapt(policies=("gns:max_batch=2048",)).to_json()
        {'policies': ['gns:max_batch=2048'], 'monitors': []}
    """

    policies: tuple[str, ...] = ()
    monitors: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as the journal holds them; empty without policies and monitors."""
        return {name: list(texts) for name, texts in asdict(self).items()} if self != Adapt() else {}


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides a run.

    ``config``, ``seed``, ``sync`` and ``sync_schedule`` are hyperparameters: they decide the result. ``execution`` has
    the execution settings.

    Attributes:
        out: The folder of the run's journal, checkpoints and logs.
        epochs: Replaces the number of epochs that the program asks of ``session.epochs``.
        max_steps: Ends the run after so many steps.
        until_epoch: Ends the run after so many epochs, with a checkpoint.
        checkpoint_every_steps: None: a checkpoint at the end of each epoch; k: also after every k steps; 0: none at
            all.
        keep_checkpoints: Which checkpoints stay when newer ones come.
        resume: Continue from the newest checkpoint in ``out``.
        parent: The folder of another run: begin with its newest checkpoint, with this run's own config.
        from_dcp: A checkpoint of torch.distributed.checkpoint: begin with its weights, and with the optimizer's tensors
            that it has.
        start_from: Begin with the weights of another model, as far as they fit.
        spool: The folder through which a worker and its agent exchange files; None: ``out``, which the worker shares
            with the controller.
        measure_link: Time a few all-reduces at the end, for the step-time model.
        spread: Use as many hosts as possible, not as few; for measurements.
        divergence: The rule by which the run has failed.
        source: The program at the start of the run. A worker that has loaded another program is not let in.
        data_seen: The expected training set, as a journal holds it (``DataContext``); None: not known.
        accept_changes: Go on from a checkpoint with another program or other data.
        proves: Prove in the first step that several slots train as one pass a batch.
        checked: ``elastune check`` has found nothing in the program.
        verify: How often slots are computed by a second worker, too; None: never.
    """

    program: Program
    out: Path
    config: Config = field(default_factory=dict)
    seed: int = 0
    execution: ExecutionSettings = field(default_factory=ExecutionSettings)
    sync: SyncPlan = field(default_factory=SyncPlan)
    sync_schedule: SyncSchedule = field(default_factory=SyncSchedule)
    epochs: int | None = None
    max_steps: int | None = None
    until_epoch: int | None = None
    checkpoint_every_steps: int | None = None
    keep_checkpoints: KeepCheckpoints = field(default_factory=KeepCheckpoints)
    resume: bool = False
    parent: Path | None = None
    from_dcp: Path | None = None
    start_from: StartFrom | None = None
    spool: Path | None = None
    measure_link: bool = False
    spread: bool = False
    elastic: Elastic = field(default_factory=Elastic)
    adapt: Adapt = field(default_factory=Adapt)
    divergence: Divergence = field(default_factory=Divergence)
    source: ProgramSource = field(default_factory=dict)
    data_seen: dict[str, Any] | None = None
    accept_changes: bool = False
    proves: bool = False
    checked: bool = False
    verify: VerifyPlan | None = None

    @property
    def shares_batches(self) -> bool:
        """Whether several slots, or several workers in ``fast`` mode, train each global batch."""
        return self.most_workers > 1 or (self.execution.mode == "exact" and self.execution.num_slots > 1)

    @cached_property
    def most_workers(self) -> int:
        """The most workers that the run may have at once."""
        return max(self.execution.workers, self.elastic.high or 0)


@dataclass(frozen=True)
class Place:
    """The place of one worker: its rank, its device, and how it meets the others.

    Attributes:
        rank: Its rank among ``world`` workers. In an elastic run it is the worker's number in this run, never used
            twice; ranks in the strict sense come with each view of the membership.
        own_device: No other worker uses this worker's device (NCCL needs that; gloo does not).
        rendezvous: A ``torch.distributed`` init method (``file://...``, ``tcp://host:port``, ``env://``); "" for a
            single worker.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: str = "cpu"
    own_device: bool = True
    rendezvous: str = ""


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    The order of samples is a pure function of (seed, epoch), so these few numbers name the next global batch.

    Attributes:
        epoch: Completed epochs.
        offset: Used samples of the current epoch.
        step: Completed steps.
        samples: Used samples in all.
        turn: Steps already taken with the next global batch, where each batch has several.
    """

    epoch: int = 0
    offset: int = 0
    step: int = 0
    samples: int = 0
    turn: int = 0


# Whether a run can have a sync strategy: at its start, by its schedule, by a policy or by the program.


def check_strategy(plan: SyncPlan, spec: RunSpec) -> None:
    """Refuse a ``plan`` that ``spec`` cannot have. Only workers can check the length of a pass
    (``train.data.planned``).

    Raises:
        UserError: For learners that do not go with slots, workers, mechanism, mode or compression, and for a round that
            is longer than the run.
    """
    execution, max_steps = spec.execution, spec.max_steps
    plan.check(execution.num_slots, spec.most_workers, execution.mechanism, execution.mode)
    if max_steps is not None and plan.in_rounds and plan.every > max_steps:
        rule = "a round must not be longer than the run"
        raise UserError(rule, f"{plan}, {max_steps} steps", "use fewer steps a round (every), or more --max-steps")
    if plan.in_rounds and execution.compress is not None:
        fix = "use --sync allreduce, or leave --compress out"
        raise UserError(
            "learners exchange parameters, not gradients", f"--compress {execution.compress} with {plan}", fix
        )


def check_verification(spec: RunSpec) -> None:
    """Raise ``UserError`` for a run whose slots no second worker can compute with equal bits."""
    execution, fix = spec.execution, "leave --verify out"
    if spec.verify is None:
        return
    if execution.mode != "exact":
        raise UserError("only exact mode has equal bits on every worker", f"--verify with {execution.mode} mode", fix)
    if spec.most_workers < 2:
        raise UserError("a second worker verifies the first", "--verify with 1 worker", f"use --workers 2, or {fix}")
    if any(plan.in_rounds for plan in (spec.sync, *(plan for _, plan in spec.sync_schedule.changes))):
        rule = "slots are compared where workers sum gradients in each step"
        raise UserError(rule, f"--verify with {spec.sync}", f"use --sync allreduce, or {fix}")
    if execution.mechanism not in VERIFIABLE:
        rule = "a second worker must be able to compute a slot alone, with a whole model"
        fix = f"use --mechanism {' or '.join(VERIFIABLE)}, or {fix}"
        raise UserError(rule, f"--verify with {execution.mechanism}", fix)


def check_schedule(spec: RunSpec) -> None:
    """Raise ``UserError`` for a change of strategy after the end of the run, where its end is known."""
    late = spec.sync_schedule.beyond(MOST_STEP + 1 if spec.max_steps is None else spec.max_steps)
    if late.changes:
        rule, value = "a schedule of strategies must end before the run does", f"{late}, {spec.max_steps} steps"
        raise UserError(rule, value, "use an earlier step, or more --max-steps, or leave it out")


def refuse_repeated_batches(plan: SyncPlan) -> None:
    """Raise ``UserError`` where a program takes several steps with each batch but learners would take one."""
    if plan.in_rounds:
        raise UserError("turns need workers that agree in each step", plan, "use --sync allreduce")


# The settings for the length of a training. A larger value continues it; any other change makes another training.

VERIFIABLE = ("replicated", "zero")
"""The mechanisms whose workers compute a slot without another worker."""
OF_A_CALL = ("resume", "accept_changes", "out", "workers", "cluster", "token_file", "grace_s", "json")
"""What a script's own command line may have for ``elastune.run``, such as ``--resume``. It shows in no result."""
LENGTHS = ("epochs", "num_epochs", "max_epochs", "num_train_epochs", "max_steps")


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the sorted names of settings that differ, except lengths of the training that have grown, and what is of
    a call and not of the training.

    Args:
        then: The settings at the start of the training.
        now: The settings with which it is to continue.

    Example:
        >>> changed_settings({"lr": 0.1, "epochs": 2}, {"lr": 0.2, "epochs": 4})
        ['lr']
    """
    return sorted(name for name in {*then, *now} if name not in OF_A_CALL and not _continues(name, then, now))


def grown(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of the lengths that are larger in ``now`` than in ``then``."""
    return [name for name in LENGTHS if name in then and name in now and _more(then[name], now[name])]


def _continues(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if name not in then or name not in now:
        return False
    old, new = then[name], now[name]
    if old == new and isinstance(old, bool) == isinstance(new, bool):
        return True
    return name in LENGTHS and _more(old, new)


def _more(old: object, new: object) -> bool:
    numbers = [each for each in (old, new) if isinstance(each, (int, float)) and not isinstance(each, bool)]
    return len(numbers) == 2 and numbers[1] > numbers[0]


# A command line that "elastune resume" can repeat.


@dataclass(frozen=True)
class CommandLine:
    """A command line as a journal keeps it, for ``elastune resume``.

    Options for one call alone (--out, --resume, --json, faults) are left out.

    Attributes:
        words: Such as ("run", "--workers=2", "--", "train.py").
        folder: The working directory of the call.
    """

    words: tuple[str, ...]
    folder: str


# Independent seeds from a run's seed.


def derive(seed: int, *keys: str | int) -> int:
    """Return a 63-bit seed that depends on ``seed`` and ``keys`` only: equal on every machine, process and version."""
    text = "\x1f".join(map(str, (seed, *keys))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
