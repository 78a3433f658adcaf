"""The nouns of a run: the program, its meaning (config, seed) and the means it runs by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from elastune.core.compression import Compression
from elastune.core.divergence import Divergence
from elastune.core.errors import UserError
from elastune.core.mechanism_name import MechanismName
from elastune.core.mesh import Mesh
from elastune.core.start_from import StartFrom
from elastune.core.sync_plan import SyncPlan
from elastune.core.sync_schedule import SyncSchedule
from elastune.core.topology import Topology

Mode = Literal["exact", "fast"]
Precision = Literal["fp32", "bf16"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
Scalar = bool | int | float | str
DEFAULT_SLOTS = 4  # docs/decisions/0010; more workers than that raise it
DEFAULT_VIRTUAL_TENSOR = 4  # likewise, where layers are divided
ConfigValue = Scalar | None | list["ConfigValue"]
Config = dict[str, ConfigValue]


def number(config: Config, name: str) -> float:
    """The numeric setting ``name``. Raises ``KeyError`` where there is none, ``TypeError`` where it is no number."""
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return value


@dataclass(frozen=True)
class Program:
    """A Python file of the user's and the name of the training function in it.

    ``data``: the folder that it was told to find its data sets in, where it was told one.
    """

    path: Path
    train: str = "train"
    data: Path | None = None

    @property
    def told_data(self) -> str | None:
        """``data`` as a journal keeps it."""
        return None if self.data is None else str(self.data)


@dataclass(frozen=True)
class Means:
    """System parameters (parallelism and execution): how a result is computed, and at what speed and cost.

    In ``exact`` mode none of them shows in the result but ``num_slots``, ``virtual_tensor``, ``precision`` and
    ``threads``; ``compress``, which is for ``fast`` mode, does. Left out, ``workers`` are those of the mesh, and
    ``mechanism`` is the least that the mesh needs.

    Args:
        workers: processes that train together at the beginning.
        mode: "exact" (equal bits for any number of workers) or "fast" (equal up to rounding).
        mechanism: how a replica of the model lies on workers; "replicated": every worker holds all of it. Names that
            go together are joined: "tensor+zero". See ``core.mechanism_name``.
        num_slots: equal shares of every global batch. It belongs to the run and stays when workers change.
        threads: CPU threads of each worker; equal on every worker, since CPU kernels may differ with it.
        device: "cpu", "cuda" or "cuda:N".
        precision: "fp32" or "bf16" (autocast in the forward pass).
        micro_batch: samples of one forward pass at most; None: no bound.
        mesh: the workers as a grid; None: all of them along the axis of the mechanism, see ``first_mesh``.
        copies: how many workers hold each piece of divided state; None: two where workers may change, else one.
        virtual_tensor: blocks that layers are divided into for the tensor axis; it belongs to the run, as
            ``num_slots`` does. 1 where the mechanism divides no layers.
        schedule: the order in which a pipeline's stages run forward and backward passes.
        offload: optimizer state lies in the memory of the CPU.
        zero_stage: what DeepSpeed or FairScale divide: 1 optimizer state, 2 gradients too, 3 parameters too; None:
            what the mechanism does by default.
        compress: how gradients are made smaller before they travel, "int8" or "powersgd:rank=4" (``core.compression``);
            None: not at all.
        topology: by which routes sums travel, see ``core.topology``; a text is read as ``--topology``.

    Example:
        >>> elastune.run(train, {"lr": 0.1}, means=elastune.Means(workers=4, mode="fast", micro_batch=64))
    """

    workers: int = None  # type: ignore[assignment]  # a number once it is made
    mode: Mode = "exact"
    mechanism: str = None  # type: ignore[assignment]
    num_slots: int = DEFAULT_SLOTS
    threads: int = 1
    device: str = "cpu"
    precision: Precision = "fp32"
    micro_batch: int | None = None
    mesh: Mesh | None = None
    copies: int | None = None
    virtual_tensor: int = None  # type: ignore[assignment]
    schedule: Schedule = "1f1b"
    offload: bool = False
    zero_stage: int | None = None
    compress: str | None = None
    topology: Topology = field(default_factory=Topology)

    def __post_init__(self) -> None:
        told: Any = self
        for name_ in ("copies", "virtual_tensor", "zero_stage"):
            value = getattr(told, name_)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise UserError(f"{name_} must be a whole number", repr(value), f"for example {name_}=2")
        if not isinstance(told.mesh, Mesh | None):
            raise UserError("a mesh must be a Mesh", repr(told.mesh), "use elastune.Mesh(data=2, shard=2)")
        if not isinstance(told.topology, Topology):
            if not isinstance(told.topology, str):
                raise UserError("a topology must be a text", repr(told.topology)[:100], 'such as "tree"')
            object.__setattr__(self, "topology", Topology.parse(told.topology))
        if not isinstance(told.mechanism, str | None):
            raise UserError("a mechanism must be a text", repr(told.mechanism), 'such as "tensor+zero"')
        if not isinstance(told.compress, str | None):
            raise UserError("a compression must be a text", repr(told.compress)[:100], 'such as "powersgd:rank=4"')
        compression = None if told.compress is None else Compression.parse(told.compress)
        blocks = told.virtual_tensor
        least = MechanismName.least_for(self.mesh, blocks)
        name = least if told.mechanism is None else MechanismName.parse(self.mechanism)
        workers = told.workers
        if workers is None:
            workers = 1 if self.mesh is None else self.mesh.workers
        if blocks is None:
            alone = workers if name.dividing == ("tensor",) else 1
            blocks = max(DEFAULT_VIRTUAL_TENSOR, alone if self.mesh is None else self.mesh.tensor) if name.tensor else 1
        compress = None if compression is None else str(compression)
        settled = {"mechanism": str(name), "workers": workers, "virtual_tensor": blocks, "compress": compress}
        for field_, value in settled.items():
            object.__setattr__(self, field_, value)

    @property
    def parts(self) -> MechanismName:
        """What the mechanism's name says."""
        return MechanismName.parse(self.mechanism)

    @property
    def compression(self) -> Compression | None:
        """What ``compress`` says."""
        return None if self.compress is None else Compression.parse(self.compress)

    @property
    def first_mesh(self) -> Mesh:
        """The mesh that a run begins with: the one that was asked for, or what the mechanism makes of ``workers``.

        Raises:
            UserError: Where the mechanism divides along several axes and nobody has said how many workers along which.
        """
        return self.parts.mesh(self.workers) if self.mesh is None else self.mesh

    def on(self, workers: int) -> Means:
        """The same on as many whole replicas as ``workers`` carry; if none, all along the mechanism's axis."""
        mesh = None if self.mesh is None else self.mesh.fitted(workers)
        return replace(self, workers=workers if mesh is None else mesh.workers, mesh=mesh)

    def to_json(self) -> dict[str, Any]:
        """As a journal holds it: plain values, without those that say nothing of this mechanism."""
        parts, plain = self.parts, {f.name: getattr(self, f.name) for f in fields(self)}
        plain["mesh"] = None if self.mesh is None else str(self.mesh)
        plain["topology"] = str(self.topology)
        silent = {
            "mesh": self.mesh is None,
            "copies": self.copies is None,
            "virtual_tensor": self.virtual_tensor == 1 and not parts.tensor,
            "schedule": self.schedule == Means.schedule and not parts.pipeline,
            "offload": not self.offload,
            "zero_stage": self.zero_stage is None,
            "compress": self.compress is None,
            "topology": self.topology == Topology(),
        }
        return {name: value for name, value in plain.items() if not silent.get(name, False)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Means:
        """What ``to_json`` gave, in a journal or on the wire.

        Raises:
            TypeError: Where it names what is no system parameter.
            UserError: For a mesh or mechanism that is none.
        """
        mesh = told.get("mesh")
        if not isinstance(mesh, str | None):
            raise UserError("a mesh must be a text", repr(mesh)[:100], 'such as "data=2,shard=2"')
        return cls(**{**told, "mesh": mesh if mesh is None else Mesh.parse(mesh)})


@dataclass(frozen=True)
class Elastic:
    """How a run's workers may change while it goes on: from ``low`` to ``high`` (None: as many as it began with).

    A worker that is silent for ``heartbeat_s`` counts as lost. A run that loses workers ``most_losses`` times and comes
    no further in between (steps that survive, a later checkpoint or report) has failed: whatever kills them would go on
    killing. For one that lives and does not come to a reduction or gather workers wait for ``collective_timeout_s``;
    then the run ends and says who was missing. Without a controller workers go on for ``grace_s``, and look for the
    next one; 0: they end with it.
    """

    low: int = 1
    high: int | None = None
    heartbeat_s: float = 5.0
    most_losses: int = 8
    collective_timeout_s: float = 1800.0  # as torch's own on gloo
    grace_s: float = 0.0


@dataclass(frozen=True)
class Adapt:
    """What is measured while a run goes on, and what changes it.

    ``policies``: as ``--policy`` writes them, "gns:max_batch=2048"; in order. ``monitors``: further ones than policies
    ask for, "noise_scale" or "noise_scale:every=10".
    """

    policies: tuple[str, ...] = ()
    monitors: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As the journal holds it: empty without policies and monitors."""
        return {name: list(texts) for name, texts in asdict(self).items()} if self != Adapt() else {}


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides a run. ``config``, ``seed``, ``sync`` and ``sync_schedule`` are its meaning, ``means``
    its means.

    ``out`` holds the run's journal, checkpoints and logs. ``epochs`` overrides what the program asks of
    ``session.epochs``; ``max_steps`` ends the run early; so does ``until_epoch``, after that many, with a checkpoint.
    ``resume`` continues from the newest checkpoint in ``out``; ``parent``, the folder of another run, begins with the
    newest one there and goes on with this run's own config; ``from_dcp``, a checkpoint of torch.distributed.checkpoint,
    begins with its weights and what it has of the optimizer's tensors; ``start_from``, with what fits of the weights of
    another model.
    ``checkpoint_every_steps``: None writes one at each epoch's end, k also after every k steps, 0 none at all.
    ``measure_link``: time a few all-reduces at the end, for the step-time model. ``spread``: over as many hosts as
    there are, instead of as few as it takes; for measuring. ``divergence``: when it has failed. ``spool``: where a
    worker leaves its files for its agent, and finds those that it asks for; None: in ``out``, which it shares with the
    controller.
    """

    program: Program
    out: Path
    config: Config = field(default_factory=dict)
    seed: int = 0
    means: Means = field(default_factory=Means)
    sync: SyncPlan = field(default_factory=SyncPlan)
    sync_schedule: SyncSchedule = field(default_factory=SyncSchedule)
    epochs: int | None = None
    max_steps: int | None = None
    until_epoch: int | None = None
    checkpoint_every_steps: int | None = None
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

    @property
    def most_workers(self) -> int:
        """How many workers the run may ever have at once."""
        return max(self.means.workers, self.elastic.high or 0)


@dataclass(frozen=True)
class Place:
    """Where one worker stands: its rank among ``world`` workers, its device, and how it meets the others.

    Of an elastic run ``rank`` is the worker's number in this run, never used twice; ranks in the strict sense come with
    each view of the membership.

    ``own_device``: no other worker uses this worker's device (NCCL needs that; gloo does not). ``rendezvous`` is a
    ``torch.distributed`` init method (``file://...``, ``tcp://host:port``, ``env://``); empty for a lone worker.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: str = "cpu"
    own_device: bool = True
    rendezvous: str = ""


@dataclass(frozen=True)
class Position:
    """How far a run has come: completed epochs, samples used of the current epoch, global steps taken.

    ``turn``: how many steps the next global batch has had already, where each has several.

    The order of samples is a pure function of (seed, epoch), so this small value names the next global batch.
    """

    epoch: int = 0
    offset: int = 0
    step: int = 0
    samples: int = 0
    turn: int = 0
