"""What can be known of a run before a worker starts; takes torch and the program, a second and more."""

from __future__ import annotations

from elastune.core.run import RunSpec
from elastune.job.validate_adapt import check_adapt
from elastune.job.validate_means import check_means
from elastune.search.space.overrides import override
from elastune.train.program.load import load_as_guest


def check_run(spec: RunSpec) -> None:
    """Refuse system parameters, settings, policies and monitors that are wrong, or contradict each other.

    Raises ``UserError``.
    """
    check_means(spec)
    program = load_as_guest(spec.program)
    override(program.config, spec.config, program.space)
    check_adapt(spec.adapt, program, spec)
