"""What a training function may exchange by name while it goes on computing."""

from __future__ import annotations

import torch

from elastune.core.errors import UserError
from elastune.train.collectives import Begun, Call, Kind, NamedCollectives
from elastune.train.session_changes import SessionChanges


class SessionCollectives(SessionChanges):
    """The part of ``Session`` that begins named collectives. Every worker calls the same ones between the same two
    steps, in any order; the n-th call of a name belongs with the n-th elsewhere.
    """

    _collectives: NamedCollectives

    def allreduce(self, name: str, tensor: torch.Tensor) -> Begun[torch.Tensor]:
        """Begin to add ``tensor`` up over all workers; it is copied, and travels while training goes on.

        Args:
            name: What the workers know it by.
            tensor: This worker's part: of one shape and type on all of them.

        Returns:
            A handle; ``handle.wait()`` tells the sum (on the CPU) and the numbers of those who took part.

        Raises:
            UserError: For what cannot be sent, and inside of a step.

        Example:
            >>> if session.ends_step:
            ...     handle = session.allreduce("hits", hits)
            ...     evaluate_something_else()
            ...     total = handle.wait().value
        """
        return Begun(self._collectives, self._begin("allreduce", name, tensor), lambda found: found[0])

    def broadcast(self, name: str, tensor: torch.Tensor, root: int = 0) -> Begun[torch.Tensor]:
        """Begin to send ``tensor`` of the worker of rank ``root`` to all; that of others is not looked at.

        Args:
            name: What the workers know it by.
            tensor: What is sent, at the root.
            root: Its rank, as workers stand now.

        Returns:
            A handle; ``handle.wait()`` tells the root's tensor, on the CPU.

        Raises:
            UserError: As ``allreduce``, and for a rank that nobody has.

        Example:
            >>> handle = session.broadcast("thresholds", torch.rand(10), root=0)
        """
        return Begun(self._collectives, self._begin("broadcast", name, tensor, root), lambda found: found[0])

    def gather(self, name: str, tensor: torch.Tensor) -> Begun[list[torch.Tensor]]:
        """Begin to bring every worker's ``tensor`` to all; shapes and types may differ.

        Args:
            name: What the workers know it by.
            tensor: This worker's.

        Returns:
            A handle; ``handle.wait()`` tells the tensors, on the CPU, and the numbers of the workers they are of.

        Raises:
            UserError: As ``allreduce``.

        Example:
            >>> handle = session.gather("hardest", losses.topk(3).values)
        """
        return Begun(self._collectives, self._begin("gather", name, tensor), list)

    def _begin(self, kind: Kind, name: str, tensor: torch.Tensor, root: int = 0) -> Call:
        if self._transaction.more_to_come and self._workers.synchronised:
            fix = "put 'if session.ends_step:' before it, or move it after the loop"
            raise UserError(f"session.{kind} belongs between steps", "a call inside of a step", fix)
        return self._collectives.start(kind, name, tensor, root)
