"""The methods of a session for the program's own state, its side effects, and its early end."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, TypeVar

from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan
from elastune.train.once import claim
from elastune.train.progress import BY_PROGRAM
from elastune.train.session_assets import SessionAssets
from elastune.train.step_exchange import StepExchange
from elastune.train.stepper import Stepper
from elastune.train.tracked import Tracked

T = TypeVar("T")
LONGEST_WHY = 300
FILE_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")


class SessionState(SessionAssets):
    """The part of ``Session`` by which the program's own state, side effects and end are shared by all workers."""

    _tracked: Tracked
    _exchange: StepExchange
    _stepper: Stepper

    @property
    def leader(self) -> bool:
        """Whether this worker acts for all: it prints, writes a file, or updates a dashboard.

        At most one worker is the leader at a time, and never one that is still on its way back to where the run is.
        Between two steps without a loss, the leader acts once. If a worker is lost just then, the leader's work since
        the last step may be done again, perhaps by another worker; if the leader itself is lost before it comes to that
        line, nobody does it. So write files anew instead of appending to them. ``session.report`` keeps each value
        once; use ``session.once`` for what must not happen twice.
        """
        return self.rank == 0 and self._workers.synchronised

    def once(self, name: str) -> bool:
        """Return whether this worker is to do ``name`` now: True on one worker, once in the life of the run.

        The first worker that comes here gets it, so a lost worker does not stop it. The mark (``once/NAME`` in the
        run's folder) is on the disk before this returns, and a resumed run finds it. So what was begun is never begun
        again, even where its worker was killed before the end. Inside a batch loop, only the batch that completes a
        step can be given it. Workers may come here at different times: call no method of the session in the block.

        Args:
            name: Letters, digits, ``_`` and ``-``; use another name for each occasion: ``f"epoch-{epoch}"``.

        Returns:
            Whether this worker is to do it.

        Raises:
            UserError: For a name that no file can have, and where hosts do not share the run's folder, or it is full.

        Example:
            >>> if session.once(f"mail-{session.epoch}"):
            ...     send_mail(f"epoch {session.epoch} is done")
        """
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            fix = 'such as session.once("mail-3")'
            raise UserError("what is done once is named by up to 80 letters, digits, _ and -", repr(name)[:60], fix)
        if self._spec.spool is not None:
            rule, fix = "what was done once is noted in a folder that all share", "use a cluster without folder=local"
            raise UserError(rule, "a folder of each host's own", fix)
        if not self._workers.synchronised or not self.ends_step:
            return False  # the way back to where the run is leads here again, and so does the end of the step
        return claim(self._home, name, f"worker {self._workers.worker}, after step {self.step}")

    def track(self, name: str, obj: T) -> T:
        """Make ``obj`` a part of the run's state.

        The state is saved in checkpoints, sent to workers that join, and taken back where a step is taken back. Call
        this after ``session.prepare``, in the same way on every worker. Change the object in the same way on all
        workers, between steps (``if session.ends_step:``); an ``AveragedModel`` does so by itself.

        Args:
            name: Its name in checkpoints.
            obj: Anything with ``state_dict`` and ``load_state_dict`` of tensors, numbers and text, or a dict of these.

        Returns:
            ``obj``.

        Raises:
            UserError: For a name that is taken, an object without state, a mechanism that leaves each worker a part of
                the model, and sync strategies whose learners differ.

        Example:
            >>> ema = session.track("ema", AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)))
            >>> best = session.track("best", {"loss": float("inf")})
        """
        trained = self.trained
        if trained is None:
            raise UserError("session.track comes behind session.prepare", "no model yet", "call session.prepare first")
        if trained.in_shares:
            rule, fix = "what is tracked is equal on all workers", "use --mechanism replicated"
            raise UserError(rule, f"{name} where workers hold a part of the state each", fix)
        self._tracked.add(name, obj, lambda: self.ends_step)
        self._forbid(self._tracked.refuse)
        return obj

    def _forbid(self, rule: Callable[[SyncPlan], object]) -> None:
        """No strategy for which ``rule`` raises ``UserError``: neither now, nor by schedule, nor asked for later."""
        in_use = self.state.prepared.in_use
        in_use.forbid(rule)
        for step, plan in self._spec.sync_schedule.changes:
            if step > in_use.scheduled:
                rule(plan)

    def stop(self, why: str) -> None:
        """End training here, as if all epochs were done.

        The loops over ``session.epochs`` and ``session.batches`` end, and the code after them still runs. A resumed run
        does not train on. Every worker must call this, between steps, for a reason that is equal on all workers: a
        reported metric, a mean.

        Args:
            why: One line for the journal and the report.

        Raises:
            UserError: Inside of a step, and where other workers do something else instead.

        Example:
            >>> session.report(loss=loss)
            >>> if session.metrics["loss"] > best["loss"] and session.epoch > 5:
            ...     session.stop("the validation loss rises")
        """
        if not isinstance(why, str) or not why.strip():
            raise UserError("session.stop says why", repr(why)[:80], 'session.stop("the loss rises")')
        why = " ".join(why.split())[:LONGEST_WHY]
        self._refuse_inside("stop")
        self._evaluations.meet([], f"session.stop({why})")
        if self._workers.synchronised:  # else it is on the way back to where the run is, which knows
            self._progress.stopped, self._progress.stop_why = BY_PROGRAM, why

    def save_best(self, metric: str, direction: Literal["min", "max"] = "max") -> bool:
        """Keep a checkpoint of the best model so far, by the newest reported value of ``metric``.

        The checkpoint stays in the run's folder until a better one replaces it; ``elastune export RUN/best/METRIC`` and
        ``--start-from RUN/best/METRIC`` read it. Every worker must call this, between steps, after ``session.report``.

        Args:
            metric: A name that was reported.
            direction: Which values are better.

        Returns:
            Whether the model is the best so far and was kept. Where the disk has no room for it, the earlier best
            stays.

        Raises:
            UserError: For a metric that was not reported, and where hosts do not share the run's folder.

        Example:
            >>> session.report(accuracy=right / count)
            >>> session.save_best("accuracy")
        """
        self._refuse_inside("save_best")
        if self._spec.spool is not None:
            rule, fix = "the best checkpoint lies in a folder that all share", "use a cluster without folder=local"
            raise UserError(rule, "a folder of each host's own", fix)
        if not FILE_NAME.fullmatch(metric):
            rule, fix = "a metric that names a folder has letters, digits, _ and -", "report it under such a name"
            raise UserError(rule, repr(metric)[:60], fix)
        if metric not in self.metrics or direction not in ("min", "max"):
            rule, fix = "the best is by a reported metric, min or max", 'session.save_best("accuracy", "max")'
            raise UserError(rule, f"{metric}, {direction}; reported: {', '.join(sorted(self.metrics)) or 'none'}", fix)
        self._evaluations.meet([], f"session.save_best({metric})")
        if not self._workers.synchronised:
            return False
        value, best = self.metrics[metric], self._progress.best.get(metric)
        better = best is None or (value > best if direction == "max" else value < best)
        if better:
            self._exchange.commit()
            self._progress.best[metric] = value
            self._stepper.save()
            if not self.state.keep_best(metric):  # no room, which the journal says
                del self._progress.best[metric]
                self._progress.best |= {metric: best} if best is not None else {}
                return False
        return better
