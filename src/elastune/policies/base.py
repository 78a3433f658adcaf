"""The contract of a policy: hooks that training calls on every worker, and what they may do there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from elastune.policies.run import Run


class Policy:
    """Override the hooks you need. Every worker runs the same policies; what they decide is applied by all at one step
    boundary, if all have decided alike, and journaled.

    ``monitors``: what must be measured for it. The instance's attributes are its state: JSON values (numbers, strings,
    lists, dicts), which joiners and checkpoints take over; a policy with other state overrides ``state`` and ``load``.
    """

    monitors: ClassVar[tuple[str, ...]] = ("noise_scale", "performance")
    survives_divergence: ClassVar[bool] = False  # a loss that is not finite is this policy's to handle

    def before_train(self, run: Run) -> None:
        """Once, before the first step (of a resumed run too)."""

    def before_epoch(self, run: Run) -> None:
        """Before an epoch's first step."""

    def before_step(self, run: Run) -> None:
        """Before a step: what is decided here rides in this step's reduction and counts after it."""

    def after_step(self, run: Run) -> None:
        """After a step: what is decided here rides in the next step's reduction and counts after that."""

    def after_epoch(self, run: Run) -> None:
        """After an epoch's last step."""

    def after_train(self, run: Run) -> None:
        """Once, after the last step: for what it wants to say; nothing can be changed any more."""

    def state(self) -> dict[str, Any]:
        """All that changes while training runs, as JSON."""
        return dict(vars(self))

    def load(self, state: dict[str, Any]) -> None:
        """Be as ``state`` says."""
        vars(self).update(state)
