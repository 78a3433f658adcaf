"""How other commands find a run that is going on, and the next controller its workers."""

from __future__ import annotations

from elastune.core.errors import UserError
from elastune.core.run import RunSpec
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.protocol.client import write_contact


def announce(spec: RunSpec, coordinator: Coordinator) -> None:
    """Write into its folder where the coordinator of the run ``spec`` is. Raises ``UserError``."""
    try:
        spec.out.mkdir(parents=True, exist_ok=True)  # workers elsewhere may have made none yet
        write_contact(spec.out, coordinator.address, coordinator.token, spec.elastic.grace_s)
    except OSError as error:
        rule = "the output folder must be writable"
        raise UserError(rule, f"{spec.out}: {error.strerror}", "choose another folder") from error
