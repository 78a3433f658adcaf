"""The contract of a kind of cluster: the settings in its name, checked, and how it is opened.

A name is ``KIND[:SETTING,...]``, each setting ``KEY=VALUE``. A kind is a dataclass of its settings; the types of
its fields say which values are allowed. To add a kind, write it and name it in ``registry``.
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
"""Of what a batch system or Ray gives (``core.cost.KINDS``)."""
Folder = Literal["auto", "shared", "local"]
"""Whether hosts see the folder of a run, or have folders of their own; "auto": as is found out."""


def has_own_folders(folder: Folder, room: CapacityRequest) -> bool | None:
    """Whether hosts have folders of their own; None: it is to be found out. What has outlived its controller goes on as
    it began."""
    if folder == "auto" and room.adopts:
        return had_local_folders(room.out)
    return {"auto": None, "shared": False, "local": True}[folder]


@dataclass(frozen=True)
class Access:
    """How agents and the controller find each other, where a cluster consists of agents.

    ``token_file``: the secret that agents and controller share, made where there is none; ``tls``: their connections
    are to be encrypted; ``interface``: the network they use, loopback where there is none; ``gather_s``: how long to
    wait for the first workers' room. ``notify``: is called with one line when agents come and go.
    """

    token_file: Path | None = None
    interface: str | None = None
    gather_s: float = 600.0
    notify: Callable[[str], None] = lambda line: None
    tls: bool = False


@dataclass(frozen=True)
class CapacityRequest:
    """What a job wants of its cluster. ``workers``: there must be room for so many before it begins; ``most``: it never
    has more; ``out``: the folder of its results. ``grows``: a run takes workers that come later by itself; false where
    somebody else gives them out. ``grace_s``: how long they go on without a controller; ``adopts``: some may have done
    so since the controller before this one, so none are waited for. ``spot``: says how many workers on on-demand hosts
    the one run may have.
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
    """``what`` is there, as ``value`` says; where that is None it is not, or does not fit: ``fix``."""

    what: str
    value: str | None
    fix: str = ""


class ClusterKind(ABC):
    """A cluster as its name describes it. Subclasses are frozen dataclasses of their settings."""

    name: ClassVar[str]
    form: ClassVar[str]
    """How it is written, such as "hosts:PORT"."""
    here: ClassVar[bool] = False
    """Whether workers run on this machine."""
    first: ClassVar[str | None] = None
    """The setting whose value may stand first, without its key."""

    @property
    def reports_host_kind(self) -> bool:
        """Whether hosts tell of which kind they are, spot or on-demand, so that the policy ``spot`` can choose."""
        return False

    @classmethod
    def parse(cls, text: str) -> Self:
        """From what follows the kind's name. Raises ``UserError``."""
        return cls._checked(cls._settings(text))

    @abstractmethod
    def check(self, access: Access) -> None:
        """Raise ``UserError`` where ``access`` contradicts it, or lacks what it needs. Cheap; opens nothing."""

    @abstractmethod
    def open(self, access: Access, room: CapacityRequest) -> Cluster | None:
        """The cluster, once it has ``room``. None: workers run on this machine, and each job makes its own.

        Raises ``UserError`` where it cannot be had, with nothing left of it.
        """

    def inspect(self, access: Access, out: Path | None) -> list[HostReport]:
        """What there is to find, within ``access.gather_s``; whether hosts see the folder ``out``.

        Raises ``UserError``, also where nothing is to be found.
        """
        raise UserError("a cluster of other hosts can be looked at", f"--cluster {self.name}", "such as hosts:7070")

    def examine(self) -> list[ClusterFinding]:
        """The properties of such a cluster before any host comes; empty where unknown. Raises ``UserError``."""
        return []

    @classmethod
    def _settings(cls, text: str) -> dict[str, str]:
        settings: dict[str, str] = {}
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for at, item in enumerate(text.split(",") if text else []):
            key, equals, value = item.partition("=")
            if not equals and at == 0 and cls.first is not None:
                key, value = cls.first, item
            elif not equals:
                raise UserError(f"--cluster {cls.name} has settings KEY=VALUE", repr(item), f"write it {cls.form}")
            if key not in known:
                may = f"it has {', '.join(known)}" if known else "it has none"
                raise UserError(f"--cluster {cls.name} must have settings that it knows", repr(key), may)
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
    """A cluster that is opened once a job is known to be right."""

    kind: ClusterKind
    access: Access

    def open(self, room: CapacityRequest) -> Cluster | None:
        """See ``ClusterKind.open``."""
        return self.kind.open(self.access, room)


@contextmanager
def opened(cluster: Cluster | ClusterRequest | None, room: CapacityRequest) -> Iterator[Cluster | None]:
    """The cluster that is asked for, open until the end of the block; one that is open already stays so.

    None: each job makes its own. Raises ``UserError`` where it cannot be had.
    """
    kind = cluster.kind if isinstance(cluster, ClusterRequest) else None
    if room.spot is not None and (kind is None or not kind.reports_host_kind):
        rule = "the policy spot chooses among hosts that tell their kind"
        fix = "use --cluster hosts:PORT, or kind=spot on Slurm and Ray"
        raise UserError(rule, "another cluster" if kind is None else kind.name, fix)
    if not isinstance(cluster, ClusterRequest):
        yield cluster
    elif (mine := cluster.open(room)) is None:
        yield None
    else:
        with mine:
            yield mine
