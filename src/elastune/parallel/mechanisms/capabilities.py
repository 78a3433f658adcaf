"""What each mechanism can do, by name. It imports no torch, for controllers that train nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import MappingProxyType

from elastune.core.mesh import INSTALLED
from elastune.core.mesh_choice import MeshChoice
from elastune.core.run import ExecutionSettings, RunSpec


@dataclass(frozen=True)
class Capabilities:
    """What a mechanism can do beside training. ``registry`` refuses everything else before a worker starts.

    Args:
        elastic: Workers may come and go, and the loss of one costs a step at most. If not, the first loss ends the
            run, and ``--resume`` goes on from its newest checkpoint.
        reshapes: The mesh may change while the run goes on.
        bf16: Forward passes may run under autocast.
        measures: Monitors and policies can read gradients' norms and the curvature of the loss.
        stages: The stages of ZeRO that ``ExecutionSettings.zero_stage`` may choose from; the first is the default.
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
        """Whether ``package`` is installed. This does not import it."""
        return not self.package or find_spec(self.package) is not None


ALL_CAPABILITIES = Capabilities()
ENGINE = Capabilities(elastic=False, reshapes=False, bf16=False, measures=False)
"""The capabilities of a mechanism that leaves a step to the engine of another package."""


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
"""The capabilities of the engines, by the name of the mechanism."""


def capabilities_of(execution: ExecutionSettings) -> Capabilities:
    """The capabilities of the mechanism that ``execution`` names. Imports it if another package offers it.

    Raises:
        UserError: If that import fails.
    """
    name = execution.parts
    if name.installed:
        capabilities: Capabilities = getattr(INSTALLED.load(name.foreign), "capabilities", ALL_CAPABILITIES)
        return capabilities
    return ENGINE_CAPABILITIES.get(name.foreign, ALL_CAPABILITIES)


def settled(spec: RunSpec) -> RunSpec:
    """``spec``, limited to what its mechanism can do: where it cannot lose a worker, the first loss ends the run."""
    if capabilities_of(spec.execution).elastic:
        return spec
    workers = spec.execution.workers
    return replace(spec, elastic=replace(spec.elastic, low=workers, high=workers, most_losses=1))


def meshes_of(execution: ExecutionSettings) -> MeshChoice:
    """The mesh that a run with ``execution`` should have, and the meshes that it may have."""
    return replace(MeshChoice.of(execution), fixed=not capabilities_of(execution).reshapes)
