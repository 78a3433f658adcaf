"""The contract of a kind of cluster: the settings in its name, checked, and how it is opened.

A name is ``KIND[:SETTING,...]``, each setting ``KEY=VALUE``. A kind is a dataclass of its settings; the types of
its fields say which values are allowed. To add a kind, write it and name it in ``registry``, or offer it by an entry
point (docs/extending.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import TypeAdapter, ValidationError

from elastune.core.errors import UserError
from elastune.runtime.agents.host_report import HostReport, had_local_folders
from elastune.runtime.clusters.base import Cluster

if TYPE_CHECKING:
    from elastune.runtime.spot import SpotWatch

HostKind = Literal["spot", "on-demand"]
"""The kind of the hosts that a batch system or Ray gives (``core.cost.KINDS``)."""
Folder = Literal["auto", "shared", "local"]
"""Whether hosts see the output folder ("shared") or not ("local"). "auto": the first hosts decide."""


def has_own_folders(folder: Folder, room: CapacityRequest) -> bool | None:
    """Whether hosts do not see the output folder; None: the first hosts decide.

    Workers that have outlived their controller continue as they began.
    """
    if folder == "auto" and room.adopts:
        return had_local_folders(room.out)
    return {"auto": None, "shared": False, "local": True}[folder]


@dataclass(frozen=True)
class Access:
    """How agents and the controller of a cluster of agents reach each other.

    Attributes:
        token_file: The file with their secret; it is made if it does not exist.
        interface: The network interface; None: loopback.
        gather_s: How long to wait for agents with room for the first workers.
        notify: Called with a line when an agent comes or goes.
        tls: Whether connections must be encrypted.
    """

    token_file: Path | None = None
    interface: str | None = None
    gather_s: float = 600.0
    notify: Callable[[str], None] = lambda line: None
    tls: bool = False


@dataclass(frozen=True)
class CapacityRequest:
    """The room that a job needs of its cluster.

    Attributes:
        out: The output folder.
        workers: The job begins once there is room for so many workers.
        most: The job never has more workers.
        grows: Whether a run takes workers that come later by itself; False if the caller distributes the workers.
        grace_s: How long workers go on without a controller.
        adopts: Workers may have outlived an earlier controller, so the job does not wait for others.
        spot: Decides how many workers on on-demand hosts the run may have.
    """

    out: Path
    workers: int
    most: int
    grows: bool = True
    grace_s: float = 0.0
    adopts: bool = False
    spot: SpotWatch | None = None


@dataclass(frozen=True)
class ClusterFinding:
    """A property of a cluster, for ``elastune doctor``.

    Attributes:
        name: The property.
        value: Its value; None: it is missing or does not fit.
        fix: What to do then.
    """

    name: str
    value: str | None
    fix: str = ""


class ClusterKind(ABC):
    """A kind of cluster with its settings, as ``--cluster`` names it. Subclasses are frozen dataclasses of settings.

    Example:
        >>> parse_cluster("slurm:partition=gpu")  # an object of the subclass ``SlurmKind``
    """

    name: ClassVar[str]
    form: ClassVar[str]
    """How a user writes it, such as "hosts:PORT"."""
    here: ClassVar[bool] = False
    """Whether workers run on this machine."""
    first: ClassVar[str | None] = None
    """The setting whose value may come first, without its key."""

    @property
    def reports_host_kind(self) -> bool:
        """Whether hosts report their kind, spot or on-demand, so that the policy ``spot`` can choose."""
        return False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the settings that follow the kind's name. Raises ``UserError`` for wrong settings."""
        return cls._checked(cls._settings(text))

    @abstractmethod
    def check(self, access: Access) -> None:
        """Raise ``UserError`` if ``access`` contradicts this kind, or lacks a setting. Quick; opens nothing."""

    @abstractmethod
    def open(self, access: Access, room: CapacityRequest) -> Cluster | None:
        """Open the cluster and wait until it has ``room``.

        Returns:
            The cluster; None: workers run on this machine, and each job makes its own cluster.

        Raises:
            UserError: If it cannot be opened. Nothing is left of it then.
        """

    def inspect(self, access: Access, out: Path | None) -> list[HostReport]:
        """Return what hosts report within ``access.gather_s``, and whether they see the folder ``out``.

        Raises:
            UserError: If that fails, and for a kind without other hosts.
        """
        raise UserError("only a cluster of other hosts reports hosts", f"--cluster {self.name}", "such as hosts:7070")

    def examine(self) -> list[ClusterFinding]:
        """Return the properties of the cluster before any host comes; empty if unknown. Raises ``UserError``."""
        return []

    @classmethod
    def _settings(cls, text: str) -> dict[str, str]:
        settings: dict[str, str] = {}
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for index, item in enumerate(text.split(",") if text else []):
            key, equals, value = item.partition("=")
            if not equals and index == 0 and cls.first is not None:
                key, value = cls.first, item
            elif not equals:
                raise UserError(f"--cluster {cls.name} has settings KEY=VALUE", repr(item), f"write it {cls.form}")
            if key not in known:
                fix = f"it has {', '.join(known)}" if known else "it has none"
                raise UserError(f"--cluster {cls.name} must have settings that it knows", repr(key), fix)
            if key in settings:
                raise UserError(f"--cluster {cls.name} has a setting once", key, "leave the others out")
            settings[key] = value
        return settings

    @classmethod
    def _checked(cls, settings: dict[str, str]) -> Self:
        try:
            return TypeAdapter(cls).validate_python(settings)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or cls.name
            message = first["msg"][:1].lower() + first["msg"][1:]
            got = settings.get(key, "nothing")
            raise UserError(f"--cluster {cls.name}, {key}: {message}", repr(got), f"write it {cls.form}") from None


@dataclass(frozen=True)
class ClusterRequest:
    """A cluster that is opened once all other settings of a job are checked."""

    kind: ClusterKind
    access: Access

    def open(self, room: CapacityRequest) -> Cluster | None:
        """See ``ClusterKind.open``."""
        return self.kind.open(self.access, room)


@contextmanager
def opened(cluster: Cluster | ClusterRequest | None, room: CapacityRequest) -> Iterator[Cluster | None]:
    """Give the requested cluster, open until the end of the block. A cluster that is open already stays open.

    None: each job makes its own cluster.

    Raises:
        UserError: If it cannot be opened.
    """
    kind = cluster.kind if isinstance(cluster, ClusterRequest) else None
    if room.spot is not None and (kind is None or not kind.reports_host_kind):
        rule = "the policy spot chooses among hosts that report their kind"
        fix = "use --cluster hosts:PORT, or kind=spot on Slurm and Ray"
        raise UserError(rule, "another cluster" if kind is None else kind.name, fix)
    if not isinstance(cluster, ClusterRequest):
        yield cluster
    elif (fresh := cluster.open(room)) is None:
        yield None
    else:
        with fresh:
            yield fresh
