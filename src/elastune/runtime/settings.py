"""The settings of a run, and where the workers of a run, a study, a frontier or a plan are.

Each setting is declared once, here or in ``core/settings.py``: ``elastune run`` takes its options from the fields, and
``elastune.run`` its keywords.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastune.core.checkpoint_keeping import KeepCheckpoints
from elastune.core.cost import ON_DEMAND, Prices
from elastune.core.divergence import Divergence, check_factor
from elastune.core.errors import UserError
from elastune.core.fields import COMMON, Notation, documented, setting
from elastune.core.mesh import Mesh
from elastune.core.notation import NAMED, TIME, duration_text, worker_bounds
from elastune.core.run import Adapt, Elastic, ExecutionSettings, Program, RunSpec
from elastune.core.settings import (
    CheckpointSettings,
    LoggerSettings,
    MonitorSettings,
    OutSettings,
    PriceFileSettings,
    ProofSettings,
    ResumeSettings,
    Settings,
    SyncSettings,
    TrainingSettings,
    VerifySettings,
    WaitSettings,
    WeightSettings,
)
from elastune.runtime.clusters.base import Cluster

if TYPE_CHECKING:
    from elastune.runtime.clusters.kind import ClusterRequest

LOCAL = "local"
CLUSTER = Notation("KIND[:SETTING,...]", lambda text, option: text, lambda cluster: str(cluster))


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(Settings):
    """The network of workers on other machines."""

    interface: str | None = setting(
        None,
        "Network interface for agents and workers, such as eth0. [default: loopback for a controller of --cluster "
        "hosts, else the one that leads to the other machines]",
        panel="Cluster",
    )


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(NetworkSettings):
    """Where workers run, and the connections to other machines."""

    cluster: Cluster | str | None = setting(
        LOCAL,
        "Where workers run: local (this machine), hosts:PORT (agents that you start on other machines), slurm or ray. "
        "See docs/clusters.md.",
        notation=CLUSTER,
        panel="Cluster",
    )
    token_file: str | Path | None = setting(
        None,
        "File with the secret that the controller and its agents share. It is made where there is none.",
        metavar="FILE",
        panel="Cluster",
    )
    tls: bool = setting(False, "Encrypt connections with TLS. The token file names the certificate.", panel="Cluster")
    gather_s: float = setting(
        600.0, "How long to wait until agents have room for the first workers.", "--gather", TIME, panel="Cluster"
    )

    @property
    def local(self) -> bool:
        """Whether workers run on this machine, without a cluster that was opened before."""
        return self.cluster in (None, LOCAL)

    @property
    def kinds_known(self) -> bool:
        """Whether hosts may be of several kinds, so that each kind needs a price."""
        return self.cluster.varies if isinstance(self.cluster, Cluster) else not self.local

    @property
    def words(self) -> str:
        """The settings as options, for a command that runs on the same cluster; "" for this machine.

        Raises ``UserError`` if ``cluster`` names no cluster.
        """
        if self.local or isinstance(self.cluster, Cluster):
            return ""
        from elastune.runtime.clusters.hosts import HostsKind
        from elastune.runtime.clusters.kind import Access
        from elastune.runtime.clusters.registry import parse_cluster

        kind = parse_cluster(str(self.cluster))
        if isinstance(kind, HostsKind):  # other kinds look for programs that only a login node may have
            kind.check(Access(None if self.token_file is None else Path(self.token_file)))
        words = ["--cluster", str(self.cluster)]
        words += [] if self.token_file is None else ["--token-file", str(self.token_file)]
        words += [] if self.interface is None else ["--interface", self.interface]
        words += ["--tls"] if self.tls else []
        words += [] if self.gather_s == type(self).gather_s else ["--gather", str(duration_text(self.gather_s))]
        return shlex.join(words)

    def request(self, notify: Callable[[str], None]) -> ClusterRequest:
        """The request for the cluster, which opens nothing yet. Raises ``UserError`` for settings that contradict.

        Args:
            notify: Called with one line when agents come and go.
        """
        from elastune.runtime.clusters.kind import Access, ClusterRequest
        from elastune.runtime.clusters.registry import parse_cluster

        kind = parse_cluster(LOCAL if self.cluster is None else str(self.cluster))
        token_file = None if self.token_file is None else Path(self.token_file)
        access = Access(token_file, self.interface, self.gather_s, notify=notify, tls=self.tls)
        kind.check(access)
        return ClusterRequest(kind, access)

    def place(self, grace_s: float, notify: Callable[[str], None]) -> Cluster | ClusterRequest:
        """The open cluster, or the request for one. Raises ``UserError`` for workers that cannot outlive this process.

        Args:
            grace_s: Seconds that workers go on without this process.
            notify: As in ``request``.
        """
        if isinstance(self.cluster, Cluster):
            if grace_s:
                fix = 'name it, such as cluster="hosts:7070,token_file=token"'
                rule = "with grace_s a cluster must be one that this call opens"
                raise UserError(rule, type(self.cluster).__name__, fix)
            return self.cluster
        return self.request(notify)


def read_prices(settings: PriceFileSettings, price: float | None = None, *, kinds_known: bool = False) -> Prices | None:
    """Return the prices of worker-hours; None without a file of prices and without a price.

    Args:
        settings: The file of prices.
        price: One price for all hosts.
        kinds_known: Hosts may be of any kind, so each kind needs a price; otherwise all are of ``settings.kind``.

    Raises:
        UserError: For a wrong price or file, and for both.
    """
    if settings.prices is None and settings.kind != ON_DEMAND:
        raise UserError("--kind is of --prices", settings.kind, "add --prices FILE, or leave --kind out")
    if price is None and settings.prices is None:
        return None
    from elastune.runtime.spot import prices_of

    file = None if settings.prices is None else Path(settings.prices)
    return prices_of(price, file, settings.kind, any_kind=kinds_known)


# --- a run ---


def _workers(text: str, option: str) -> int | tuple[int, int]:
    low, high = worker_bounds(text, option)
    return (low, high) if ":" in text else high


WORKERS = Notation("N|LOW:HIGH", _workers)


@documented
@dataclass(frozen=True, kw_only=True)
class RunSettings(
    PriceFileSettings,
    ClusterSettings,
    WeightSettings,
    SyncSettings,
    WaitSettings,
    ResumeSettings,
    CheckpointSettings,
    LoggerSettings,
    OutSettings,
    MonitorSettings,
    ProofSettings,
    VerifySettings,
    TrainingSettings,
):
    """The settings of a run: the options of ``elastune run``, and the keywords of ``elastune.run``.

    Example:
        >>> RunSettings({"lr": 0.1}, workers=4, policies=["gns:max_batch=2048"])
    """

    execution: ExecutionSettings | None = None  # an option for each field on the command line
    workers: int | tuple[int, int] | None = setting(
        None,
        "Number of worker processes. LOW:HIGH lets it change within these bounds; the run then begins with one worker "
        "a CPU core, within the bounds, or with those of --mesh. [default: 1, or those of --mesh]",
        notation=WORKERS,
        panel=COMMON,
    )
    policies: Sequence[str] = setting(
        (),
        'A policy that adapts the run while it trains, such as "gns:max_batch=2048". May be repeated. See '
        "docs/policies.md.",
        "--policy",
        metavar=NAMED,
        panel="Training",
    )
    max_steps: int | None = setting(None, "End the run after this many steps.", panel="Training")
    checkpoint_every_steps: int | None = setting(
        None,
        "Also write a checkpoint every N steps; 0: write none at all. [default: one at each epoch's end]",
        "--checkpoint-every",
        panel="Training",
    )
    from_dcp: str | Path | None = setting(
        None,
        "Begin with the weights in this checkpoint folder of torch.distributed.checkpoint, and with what it has of the "
        "optimizer's tensors.",
        metavar="DIR",
        panel="Training",
    )
    heartbeat_s: float = setting(
        Elastic.heartbeat_s,
        "Count a worker as lost once it has been silent for this long.",
        "--heartbeat",
        TIME,
        panel="Cluster",
    )
    price_per_worker_hour: float | None = setting(
        None,
        "Price of a worker-hour in dollars. The run prints its cost at the end. [default: no price]",
        "--price",
        panel="Cost",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        counts: tuple[Any, ...] = self.workers if isinstance(self.workers, tuple) else (self.workers,)
        if self.workers is not None and any(type(count) is not int or count < 1 for count in counts):
            raise UserError("workers must be whole numbers of at least 1", self.workers, "such as 4, or (1, 8)")
        if isinstance(self.workers, tuple) and (len(counts) != 2 or counts[0] > counts[1]):
            raise UserError("bounds of workers are (LOW, HIGH), LOW first", self.workers, "such as (1, 8)")
        for option, value, low in (
            ("--epochs", self.epochs, 1),
            ("--max-steps", self.max_steps, 1),
            ("--checkpoint-every", self.checkpoint_every_steps, 0),
        ):
            if value is not None and value < low:
                raise UserError(f"{option} must be at least {low}", value, "leave it out or raise it")
        KeepCheckpoints.parse(self.keep_checkpoints).directed({})
        if self.from_dcp is not None and not (Path(self.from_dcp) / ".metadata").is_file():
            rule = "--from-dcp names a checkpoint of torch.distributed.checkpoint"
            raise UserError(rule, self.from_dcp, "name the folder that has its .metadata")

    @property
    def changes(self) -> bool:
        """Whether the number of workers may change."""
        return isinstance(self.workers, tuple)

    def elastic(self, mesh: Mesh | None) -> tuple[int, Elastic]:
        """Return the number of workers that the run begins with, and the limits within which it may change.

        With bounds it begins with as many workers as this machine has cores, or with those of ``mesh``.
        """
        meshed = 1 if mesh is None else mesh.workers
        waits = {name: getattr(self, name) for name in ("heartbeat_s", "collective_timeout_s", "grace_s")}
        if not isinstance(self.workers, tuple):
            return meshed if self.workers is None else self.workers, Elastic(**waits)
        low, high = self.workers
        if mesh is not None:
            return meshed, Elastic(low, high, **waits)
        from elastune.train.machine import cores

        return min(high, max(low, cores())), Elastic(low, high, **waits)

    def spec(self, program: Program, out: Path, execution: ExecutionSettings, elastic: Elastic) -> RunSpec:
        """Return the run that these settings ask for. Raises ``UserError`` for two sources of weights, and for a wrong
        strategy or source."""
        if self.start_from is not None and self.from_dcp is not None:
            raise UserError("a run begins with one source of weights", "--start-from and --from-dcp", "leave out one")
        return RunSpec(
            program=program,
            out=out,
            config=dict(self.config),
            seed=self.seed,
            execution=execution,
            sync=self.choice.sync,
            sync_schedule=self.choice.schedule,
            epochs=self.epochs,
            max_steps=self.max_steps,
            checkpoint_every_steps=self.checkpoint_every_steps,
            keep_checkpoints=KeepCheckpoints.parse(self.keep_checkpoints).directed({}),
            resume=self.resume,
            from_dcp=None if self.from_dcp is None else Path(self.from_dcp),
            start_from=self.source,
            elastic=elastic,
            adapt=Adapt(tuple(self.policies), tuple(self.monitors)),
            divergence=Divergence(check_factor(self.divergence)),
            accept_changes=self.accept_changes,
            verify=self.verify_plan,
        )
