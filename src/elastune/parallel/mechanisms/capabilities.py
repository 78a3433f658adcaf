"""What each mechanism can do, by name. It imports no torch, for controllers that train nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import MappingProxyType

from elastune.core.mesh_choice import MeshChoice
from elastune.core.run import ExecutionSettings, RunSpec


@dataclass(frozen=True)
class Capabilities:
    """What a mechanism can do beside training; what it cannot is refused before a worker starts (``registry``).

    Args:
        elastic: Workers may come and go, and the loss of one costs a step at most. If not, the first loss ends the
            run, and ``--resume`` goes on from its newest checkpoint.
        reshapes: The mesh may become another one while the run goes on.
        bf16: Forward passes may run under autocast.
        measures: Gradients' norms and the loss's curvature can be told, for monitors and policies.
        stages: The stages of ZeRO that ``Means.zero_stage`` may choose from; the first is the default.
        package: The module that must be installed, and ``install``, the command that does it.
    """

    elastic: bool = True
    reshapes: bool = True
    bf16: bool = True
    measures: bool = True
    stages: tuple[int, ...] = ()
    package: str = ""
    install: str = ""

    @property
    def installed(self) -> bool:
        """Whether what it needs is there; it is not imported for that."""
        return not self.package or find_spec(self.package) is not None


ALL_CAPABILITIES = Capabilities()
ENGINE = Capabilities(elastic=False, reshapes=False, bf16=False, measures=False)
"""Of one that leaves a step to another engine."""


def _packaged(
    package: str, install: str = "pip install 'elastune[engines]'", stages: Sequence[int] = ()
) -> Capabilities:
    return replace(ENGINE, package=package, install=install, stages=tuple(stages))


ENGINE_CAPABILITIES: Mapping[str, Capabilities] = MappingProxyType(
    {
        "fsdp2": ENGINE,
        "deepspeed": _packaged("deepspeed", stages=(2, 0, 1, 3)),
        "fairscale": _packaged("fairscale", stages=(2,)),
        "horovod": _packaged("horovod", "benchmarks/horovod.sh FOLDER, then PYTHONPATH=FOLDER"),
    }
)
"""By the names of those that are engines."""


def capabilities_of(execution: ExecutionSettings) -> Capabilities:
    """Those of the mechanism that ``execution`` name."""
    return ENGINE_CAPABILITIES.get(execution.parts.foreign, ALL_CAPABILITIES)


def settled(spec: RunSpec) -> RunSpec:
    """``spec`` as its mechanism can be run: where it cannot lose a worker, the first loss ends the run."""
    if capabilities_of(spec.execution).elastic:
        return spec
    workers = spec.execution.workers
    return replace(spec, elastic=replace(spec.elastic, low=workers, high=workers, most_losses=1))


def meshes_of(execution: ExecutionSettings) -> MeshChoice:
    """What the mesh of a run with ``execution`` should be, and what it may be."""
    return replace(MeshChoice.of(execution), fixed=not capabilities_of(execution).reshapes)
