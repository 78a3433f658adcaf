"""The contract of a policy: its state, its hooks (the moments at which it is called), and what it decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from elastune.adapt.policies.collectives import NotJson, copied

if TYPE_CHECKING:
    from elastune.adapt.policies.run import Run

Hook = Literal["before_train", "before_epoch", "before_step", "after_step", "after_epoch", "after_train"]
HOOKS: tuple[Hook, ...] = get_args(Hook)


class Policy:
    """Changes batch size, learning rate or workers while a run trains. Inherit from this class to write a policy.

    Every worker runs the same policies. The journal records each request to ``run``. All workers apply a request at one
    step boundary, if all of them made the same request. A policy has one of two forms:

    - With methods: override methods that are named like the hooks. The attributes of the instance are its state, and
      must be JSON values (numbers, strings, lists, dicts). Joiners and checkpoints take over the attributes that differ
      from those that the constructor made.
    - Pure: name the ``hooks``, and override ``init`` and ``decide``, with a frozen dataclass (or one plain value) as
      state.

    If a hook raises, or its decision has no effect, nothing changes: the policy keeps the state it had.

    Attributes:
        monitors: The monitors whose signals the policy reads (docs/policies.md lists them).
        survives_divergence: Whether the policy handles a loss that is not finite.
        hooks: For a pure policy, the hooks at which ``decide`` is called.

    Example:
        >>> class Careful(elastune.Policy):
        ...     monitors = ("noise_scale",)
        ...     def after_step(self, run):
        ...         if run.grad_noise_scale() > 4 * run.batch_size():
        ...             run.set_batch_size(2 * run.batch_size(), lr="sqrt")
    """

    monitors: ClassVar[tuple[str, ...]] = ("noise_scale", "performance")
    survives_divergence: ClassVar[bool] = False
    hooks: ClassVar[tuple[Hook, ...]] = ()

    # -- pure ---------------------------------------------------------------------------------------------------------

    def init(self) -> Any:
        """Return the state before training."""
        self._copied(vars(self))
        return {}

    def decide(self, hook: Hook, state: Any, run: Run) -> Any:
        """Request changes from ``run``, and return the new state. Change neither ``state`` nor ``self``.

        By default, for a policy with methods: call the method named ``hook`` on a copy that has the attributes in
        ``state``.

        Args:
            hook: The name of the hook.
            state: The policy's state.
            run: The run; usable inside this call only.
        """
        shared = vars(self)
        copy = object.__new__(type(self))
        attributes = vars(copy)
        attributes |= self._copied({**shared, **state})
        for name in state:  # a tuple that has travelled as JSON is a list
            if isinstance(shared.get(name), tuple) and isinstance(attributes[name], list):
                attributes[name] = tuple(attributes[name])
        getattr(copy, hook)(run)
        return {name: x for name, x in self._copied(attributes).items() if name not in shared or x != shared[name]}

    def strategies(self, num_slots: int, most_workers: int) -> Sequence[str]:
        """Return the sync strategies that the policy may ask ``run.set_sync`` for, as far as they are known early.

        They are checked before the run starts. A strategy that is not named here is checked when the policy asks for
        it.

        Args:
            num_slots: Number of equal shares of every global batch.
            most_workers: The most workers that the run may have at once.

        Returns:
            Texts as for ``--sync``.
        """
        return ()

    def _copied(self, attributes: dict[str, Any]) -> dict[str, Any]:
        try:
            return {name: copied(value, name) for name, value in attributes.items()}
        except NotJson as error:
            raise error.of(f"policy {type(self).__name__}") from error

    # -- by methods ---------------------------------------------------------------------------------------------------

    def before_train(self, run: Run) -> None:
        """Called once, before the first step; in a resumed run, too."""

    def before_epoch(self, run: Run) -> None:
        """Called before the first step of an epoch."""

    def before_step(self, run: Run) -> None:
        """Called before a step. A decision travels in this step's reduction and takes effect after this step."""

    def after_step(self, run: Run) -> None:
        """Called after a step. A decision travels in the next step's reduction and takes effect after that step."""

    def after_epoch(self, run: Run) -> None:
        """Called after the last step of an epoch."""

    def after_train(self, run: Run) -> None:
        """Called once, after the last step, for final output: nothing can be changed any more."""


def hooks_of(policy: Policy) -> tuple[Hook, ...]:
    """Return the hooks at which ``policy`` wants to be called."""
    kind = type(policy)
    return policy.hooks or tuple(hook for hook in HOOKS if getattr(kind, hook) is not getattr(Policy, hook))
