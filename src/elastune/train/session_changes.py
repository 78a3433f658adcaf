"""The methods of a session that ask for changes of the run while it trains."""

from __future__ import annotations

from collections.abc import Sequence

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.signals import Decision
from elastune.core.sync_plan import SyncPlan
from elastune.core.topology import Topology
from elastune.core.votes import voted
from elastune.mechanisms.abilities import meshes_of
from elastune.train.adapt.agreement import wished
from elastune.train.session_facts import SessionFacts


class SessionChanges(SessionFacts):
    """The part of ``Session`` that asks for other workers, another mesh, parameters, strategy or routes."""

    def resize(self, workers: int) -> None:
        """Ask for another number of workers, from a later step boundary on.

        New workers first warm up while training goes on. One worker may ask, or all.

        Args:
            workers: The wanted number; it is cut to the bounds of ``--workers LOW:HIGH``.

        Raises:
            UserError: Where another launcher started the workers.
        """
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise UserError("a run needs a whole number of workers, at least 1", workers, "session.resize(2)")
        self._workers.resize(workers, "session.resize")

    def reshape(self, mesh: str | Mesh) -> None:
        """Ask for another mesh, and for as many workers as it has, from a later step boundary on.

        The workers' parts of the model then move between them; in ``exact`` mode no result changes. One worker may ask,
        or all.

        Args:
            mesh: Workers along each axis, such as "data=1,tensor=2"; axes that are left out have one.

        Raises:
            UserError: For a mesh that the run's mechanism or its ``--workers LOW:HIGH`` do not allow, and where another
                launcher started the workers.

        Example:
            >>> if session.ends_step and session.step == 100:
            ...     session.reshape("data=2,shard=2")
        """
        wanted, spec = Mesh.parse(mesh) if isinstance(mesh, str) else mesh, self._spec
        meshes_of(spec.means).widened(self.state.layers).refuse(wanted)
        low, high = min(spec.elastic.low, spec.means.workers), spec.most_workers
        if not low <= wanted.workers <= high:
            fix = "ask for a mesh of as many, or begin the run with --workers LOW:HIGH"
            raise UserError(f"this run has from {low} to {high} workers", f"{wanted}: {wanted.workers}", fix)
        self._workers.reshape(wanted, "session.reshape")

    def change(self, *, batch_size: int | None = None, lr: float | None = None) -> None:
        """Ask for another global batch size or learning rate on every worker.

        Every worker must ask for the same between the same two steps. Workers vote on it in the next step's reduction
        and change together after that step; schedulers continue from the new learning rate. The journal keeps the
        outcome, as of a policy's decision: applied; refused, where it is impossible (a batch longer than an epoch); or
        disagreed, where nothing changed.

        Args:
            batch_size: Samples in the global batch; None leaves it as it is.
            lr: The learning rate of every parameter group; None leaves it as it is.

        Raises:
            UserError: For an impossible batch size or learning rate.

        Example:
            >>> if session.ends_step and session.step == 1000:
            ...     session.change(batch_size=512, lr=0.4)
        """
        self._adapter.wish(wished(batch_size, lr))

    def set_sync(self, strategy: str) -> None:
        """Ask for another sync strategy on every worker, from the next step boundary on.

        Every worker must ask for the same between the same two steps. They vote on it as on ``change``, and the journal
        keeps the outcome. Many learners become one when their round ends; one learner becomes many when the next round
        begins.

        Args:
            strategy: A text as for ``--sync``.

        Raises:
            UserError: For a text that is no strategy, and for a strategy that this run cannot have: more workers than
                learners, slots that learners do not divide, or another mechanism than ``replicated``.

        Example:
            >>> if session.ends_step and session.step == 1000:
            ...     session.set_sync("local:learners=8,every=16")
        """
        plan = SyncPlan.parse(strategy)
        if self.state.trained is not None:
            self.state.trained.in_use.check(plan)
        self._adapter.wish(Decision(sync=str(plan)))

    def set_topology(self, topology: str) -> None:
        """Ask for other routes of the workers' sums on every worker, under the rules of ``change``.

        In ``exact`` mode no result changes. The routes change between two steps, on the process groups that exist.

        Args:
            topology: A text as for ``--topology``: "tree", "ring:chunk_kib=256", "parents=[0,0,1,0]".

        Raises:
            UserError: For a text that is no topology.

        Example:
            >>> if session.ends_step and session.step == 100:
            ...     session.set_topology("binary_tree")
        """
        self._adapter.wish(Decision(topology=voted(Topology.parse(topology))))

    def set_tree(self, parents: Sequence[int]) -> None:
        """Ask for the tree in which rank r sends its sums to ``parents[r]``; the root names itself.

        After a resize that the tree does not fit, sums take the backend's own routes. Errors are those of
        ``set_topology``.
        """
        self._adapter.wish(Decision(topology=voted(Topology.of_parents(parents))))
