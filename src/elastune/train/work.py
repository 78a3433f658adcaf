"""A worker's life: take its place, run the user's training function, say how it ended."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch

from elastune.comm.group import Group, join
from elastune.comm.link import measure_link
from elastune.core.errors import Diverged, UserError
from elastune.core.run import Place, RunSpec
from elastune.journal.records import Reason, Record, RunFailed, RunFinished
from elastune.train.program import load, merge
from elastune.train.session import Session, StopTraining
from elastune.train.state import fingerprint

EXIT_FAILED = 1
EXIT_USER_ERROR = 2

# What refers to a process group lives until the process ends (by os._exit): see comm.group.join.
_ALIVE: list[Session] = []


def work(spec: RunSpec, place: Place, send: Callable[[Record], None], stop_requested: Callable[[], bool]) -> int:
    """Run ``spec`` as the worker at ``place``; every outcome is sent as a record. Returns the process's exit code.

    Rank 0 sends reports and ``RunFinished``; whichever worker fails sends ``RunFailed``.
    """

    def failed(reason: Reason, error: BaseException) -> int:
        detail = f"{type(error).__name__}: {error}" if reason in ("exception", "out_of_memory") else str(error)
        if reason == "exception":
            traceback.print_exception(error)
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if frame.filename == str(spec.program.path.resolve())]
            at = (own or frames)[-1]  # the user's own line, where the error came up below it
            detail = f"{detail} ({os.path.basename(at.filename)}:{at.lineno})"
        send(RunFailed(reason=reason, detail=" ".join(detail.split()), rank=place.rank))
        return EXIT_USER_ERROR if reason == "user_error" else EXIT_FAILED

    try:
        device = _set_up(spec, place)
        program = load(spec.program)
        config = merge(program.config, spec.config)
        group = join(place)
        session = Session(spec, group, device, config=config, send=send, stop_requested=stop_requested)
        if group.size > 1:
            _ALIVE.append(session)
        with suppress(StopTraining):
            program.train(session)
        _finish(session, group, spec, send)
    except UserError as error:
        return failed("user_error", error)
    except Diverged as error:
        return failed("diverged", error)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return failed("out_of_memory", error)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything; it is reported, not hidden
        return failed("out_of_memory" if "out of memory" in str(error).lower() else "exception", error)
    return 0


def _set_up(spec: RunSpec, place: Place) -> torch.device:
    means = spec.means
    torch.set_num_threads(means.threads)
    device = torch.device(place.device)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
        torch.cuda.set_device(device)
        if means.mode == "exact":
            torch.backends.cudnn.benchmark = False
            torch.use_deterministic_algorithms(True, warn_only=True)
    return device


def _finish(session: Session, group: Group, spec: RunSpec, send: Callable[[Record], None]) -> None:
    seconds = session.seconds
    trained = session.trained
    digest = trained.fingerprint(group) if trained is not None else fingerprint({})
    step_s, wait_s = session.times.medians()
    if spec.measure_link and group.size > 1:
        link = measure_link(group)
        if group.rank == 0:
            send(link)
    if group.rank == 0:
        send(
            RunFinished(
                sha256=digest,
                workers=group.size,
                steps=session.step,
                samples=session.samples,
                seconds=seconds,
                metrics=session.metrics,
                step_s=step_s,
                wait_s=wait_s,
                grad_bytes=trained.gradient_bytes if trained is not None else 0,
                stopped=session.stopped,  # type: ignore[arg-type]
            )
        )
