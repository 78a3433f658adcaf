"""The methods of a session that start collectives by name, while the program computes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastune.core.errors import UserError
from elastune.train.call_letters import Kind
from elastune.train.collectives import Begun, Call, NamedCollectives
from elastune.train.session_changes import SessionChanges


class SessionCollectives(SessionChanges):
    """The part of ``Session`` that starts named collectives.

    Every worker must call the same collectives between the same two steps, in any order. The n-th call with a name
    belongs to the n-th call with it on the other workers.
    """

    _collectives: NamedCollectives

    def allreduce(self, name: str, tensor: torch.Tensor) -> Begun[torch.Tensor]:
        """Start to add up ``tensor`` over all workers. It is copied, and travels while training goes on.

        Args:
            name: The name by which workers match their calls.
            tensor: This worker's part; its shape and type are the same on all workers.

        Returns:
            A handle. ``handle.wait()`` gives the sum (on the CPU) and the numbers of the workers that took part.

        Raises:
            UserError: For a tensor that cannot be sent, and for a call inside of a step.

        Example:
            >>> if session.ends_step:
            ...     handle = session.allreduce("hits", hits)
            ...     evaluate_something_else()
            ...     total = handle.wait().value
        """
        return Begun(self._collectives, self._begin("allreduce", name, tensor), lambda found: found[0])

    def broadcast(self, name: str, tensor: torch.Tensor, root: int = 0) -> Begun[torch.Tensor]:
        """Start to send ``tensor`` from the worker of rank ``root`` to all workers.

        Args:
            name: The name by which workers match their calls.
            tensor: The tensor to send; only the root's counts.
            root: The sender's rank among the present workers.

        Returns:
            A handle. ``handle.wait()`` gives the root's tensor, on the CPU.

        Raises:
            UserError: As ``allreduce``, and for a rank that no worker has.

        Example:
            >>> handle = session.broadcast("thresholds", torch.rand(10), root=0)
        """
        return Begun(self._collectives, self._begin("broadcast", name, tensor, root), lambda found: found[0])

    def gather(self, name: str, tensor: torch.Tensor) -> Begun[list[torch.Tensor]]:
        """Start to send every worker's ``tensor`` to all workers; shapes and types may differ.

        Args:
            name: The name by which workers match their calls.
            tensor: This worker's tensor.

        Returns:
            A handle. ``handle.wait()`` gives the tensors, on the CPU, and the numbers of their workers.

        Raises:
            UserError: As ``allreduce``.

        Example:
            >>> handle = session.gather("hardest", losses.topk(3).values)
        """
        return Begun(self._collectives, self._begin("gather", name, tensor), list)

    def _stand_in(self, until: Callable[[], bool]) -> None:
        """While this worker waits for a collective: others may be in an evaluation, where they need it."""
        if self.trained is not None:
            self.trained.replica.stand_in(until)

    def _begin(self, kind: Kind, name: str, tensor: torch.Tensor, root: int = 0) -> Call:
        if self._transaction.more_to_come and self._workers.synchronised:
            fix = "put 'if session.ends_step:' before it, or move it after the loop"
            raise UserError(f"session.{kind} belongs between steps", "a call inside of a step", fix)
        return self._collectives.start(kind, name, tensor, root)
