"""What a training function may ask to be changed while it runs."""

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
    """The part of ``Session`` that asks for other workers, another mesh, other parameters, another strategy, other
    routes."""

    def resize(self, workers: int) -> None:
        """Ask for another number of workers, at a later step boundary: new ones first get warm while training goes on.

        One worker may ask, or all; what goes beyond ``--workers LOW:HIGH`` is cut to it. Raises ``UserError`` where
        another launcher started the workers.
        """
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise UserError("a run needs a whole number of workers, at least 1", workers, "session.resize(2)")
        self._workers.resize(workers, "session.resize")

    def reshape(self, mesh: str | Mesh) -> None:
        """Ask for workers that stand as ``mesh`` says ("data=1,tensor=2"), and are as many, at a later step boundary.

        What they hold of the model then moves from one to another; in ``exact`` mode no result changes by it. One
        worker may ask, or all.

        Args:
            mesh: Workers along each axis; axes that are left out have one.

        Raises:
            UserError: For what the run's mechanism does not divide along, or its ``--workers LOW:HIGH`` do not allow;
                and where another launcher started the workers.

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
        """Ask for another global batch size, or learning rate, on every worker.

        Every worker must ask for the same between the same two steps. They vote on it in the next step's reduction and
        change together after that step; schedulers go on from the new rate. What came of it is journaled, as a policy's
        decision is: applied; refused, where it cannot be (a batch longer than an epoch); or disagreed: nothing changed.

        Args:
            batch_size: Samples in the global batch; None leaves it as it is.
            lr: The learning rate of every parameter group; None leaves it as it is.

        Raises:
            UserError: For a batch size or a learning rate that cannot be.

        Example:
            >>> if session.ends_step and session.step == 1000:
            ...     session.change(batch_size=512, lr=0.4)
        """
        self._adapter.wish(wished(batch_size, lr))

    def set_sync(self, strategy: str) -> None:
        """Ask for another way in which workers agree, on every worker, from the next step boundary on.

        Every worker must ask for the same between the same two steps: they vote on it as on ``change``, and the journal
        says what came of it. Many learners become one as their round ends; one becomes many where the next begins.

        Args:
            strategy: As ``--sync`` has it.

        Raises:
            UserError: For a text that says no strategy, or one that this run cannot have: more workers than learners,
                slots that learners do not divide, another mechanism than ``replicated``.

        Example:
            >>> if session.ends_step and session.step == 1000:
            ...     session.set_sync("local:learners=8,every=16")
        """
        plan = SyncPlan.parse(strategy)
        if self.state.trained is not None:
            self.state.trained.in_use.check(plan)
        self._adapter.wish(Decision(sync=str(plan)))

    def set_topology(self, topology: str) -> None:
        """Ask for other routes of the workers' sums, on every worker, as ``change`` asks for other parameters.

        In ``exact`` mode no result changes by it. It is done between two steps, on the groups that there are.

        Args:
            topology: As ``--topology`` says it: "tree", "ring:chunk_kib=256", "parents=[0,0,1,0]".

        Raises:
            UserError: For what is no topology.

        Example:
            >>> if session.ends_step and session.step == 100:
            ...     session.set_topology("binary_tree")
        """
        self._adapter.wish(Decision(topology=voted(Topology.parse(topology))))

    def set_tree(self, parents: Sequence[int]) -> None:
        """Ask for the tree in which rank r gives its sums to ``parents[r]``; the root names itself.

        After a resize that it does not fit sums go in the backend's own way. Args and errors as ``set_topology``.
        """
        self._adapter.wish(Decision(topology=voted(Topology.of_parents(parents))))
