"""The contract of a policy: a state, and what it decides at the moments of training that are its hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from elastune.policies.json_values import NotJson, copied

if TYPE_CHECKING:
    from elastune.policies.run import Run

Hook = Literal["before_train", "before_epoch", "before_step", "after_step", "after_epoch", "after_train"]
HOOKS: tuple[Hook, ...] = get_args(Hook)


class Policy:
    """Decides, while training runs, about batch, learning rate and workers.

    Every worker runs the same policies. What they ask ``run`` for is applied by all workers at one step boundary if all
    have asked for the same, and journaled. Write one in either of two ways:

    - Override methods named like the hooks. The instance's attributes are the state: JSON values (numbers, strings,
      lists, dicts), which joiners and checkpoints take over where they differ from what the constructor made.
    - Pure: name the ``hooks``, and override ``init`` and ``decide``, with a frozen dataclass (or one plain value) as
      state.

    A hook that raises, or whose decision comes to nothing, changes nothing: the policy keeps the state it had.

    Attributes:
        monitors: The monitors whose signals it reads (docs/policies.md lists them).
        survives_divergence: Whether a loss that is not finite is this policy's to handle.
        hooks: Of a pure policy, when it is asked to ``decide``.

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
        """The state before training."""
        self._copied(vars(self))
        return {}

    def decide(self, hook: Hook, state: Any, run: Run) -> Any:
        """Ask ``run`` for what is to change, and return the state from now on; ``state`` and ``self`` stay as they are.

        By default, for policies with methods: call the method ``hook`` of a copy that has the attributes in ``state``.
        """
        own = vars(self)
        copy = object.__new__(type(self))
        attributes = vars(copy)
        attributes |= self._copied({**own, **state})
        for name in state:  # a tuple that has travelled as JSON is a list
            if isinstance(own.get(name), tuple) and isinstance(attributes[name], list):
                attributes[name] = tuple(attributes[name])
        getattr(copy, hook)(run)
        return {name: x for name, x in self._copied(attributes).items() if name not in own or x != own[name]}

    def strategies(self, num_slots: int, most_workers: int) -> Sequence[str]:
        """What it may ask ``run.set_sync`` for, where that is known before a run starts: it is checked then.

        Args:
            num_slots: Into how many equal shares every global batch is cut.
            most_workers: The most that the run may have at once.

        Returns:
            Strategies as ``--sync`` has them. Those that it does not name are checked when it asks for them.
        """
        return ()

    def _copied(self, attributes: dict[str, Any]) -> dict[str, Any]:
        try:
            return {name: copied(value, name) for name, value in attributes.items()}
        except NotJson as error:
            raise error.of(f"policy {type(self).__name__}") from error

    # -- by methods ---------------------------------------------------------------------------------------------------

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


def hooks_of(policy: Policy) -> tuple[Hook, ...]:
    """The hooks that ``policy`` wants to be called at."""
    kind = type(policy)
    return policy.hooks or tuple(hook for hook in HOOKS if getattr(kind, hook) is not getattr(Policy, hook))
