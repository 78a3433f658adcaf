"""What a controller does to files that the workers of a run have written: one seam, for clusters without shared files.

Workers write their checkpoints into their run's folder, which is the controller's too where they share a file system.
Elsewhere agents bring what workers write into it (``cluster.transfer``), or a cluster brings ``RunFiles`` of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from elastune.train.data.sample_log import SampleSpans


class RunFiles(Protocol):
    """``run`` is the output folder of a run that no worker writes into now."""

    def checkpoints(self, run: Path) -> list[int]:
        """The steps of its complete checkpoints, oldest first."""
        ...

    def spans(self, run: Path, step: int) -> SampleSpans:
        """Which samples it had used at the checkpoint of ``step``; nothing where that cannot be told."""
        ...

    def back_to_epoch(self, run: Path) -> None:
        """Let it go on from the newest checkpoint at the end of an epoch; where there is none, from the newest."""
        ...

    def damaged(self, run: Path) -> dict[int, str]:
        """The steps of its newest checkpoints that are not whole, and why, up to the first that is."""
        ...

    def set_aside(self, run: Path, steps: Iterable[int]) -> None:
        """Let it not go on from the checkpoints of ``steps``; they stay, under other names."""
        ...

    def size_bytes(self, run: Path) -> int:
        """How much of the disk it takes."""
        ...

    def seal(self, run: Path, step: int) -> str:
        """The SHA-256 that stands for all of the checkpoint of ``step``; "" where there is none."""
        ...

    def predictions(self, run: Path) -> dict[str, str]:
        """The SHA-256 of what ``session.predictions`` has left there, by name."""
        ...

    def remove(self, run: Path) -> None:
        """Remove the folder, or what can be removed of it; whenever that ends, no checkpoint in it seems whole."""
        ...


class LocalFiles:
    """Files that this process and the workers share."""

    # Imported when needed: checkpoints need torch, which a cluster's own process may do without.

    def checkpoints(self, run: Path) -> list[int]:
        """See ``RunFiles``."""
        from elastune.train.checkpoints.checkpoint import complete, step_of

        return [step_of(path) for path in complete(run / "checkpoints")]

    def spans(self, run: Path, step: int) -> SampleSpans:
        """See ``RunFiles``."""
        from elastune.train.checkpoints.checkpoint import of_step, spans

        return spans(of_step(run / "checkpoints", step))

    def back_to_epoch(self, run: Path) -> None:
        """See ``RunFiles``."""
        from elastune.train.checkpoints.checkpoint import back_to_epoch

        back_to_epoch(run / "checkpoints")

    def damaged(self, run: Path) -> dict[int, str]:
        """See ``RunFiles``."""
        from elastune.train.checkpoints.checkpoint import damaged

        return damaged(run / "checkpoints")

    def set_aside(self, run: Path, steps: Iterable[int]) -> None:
        """See ``RunFiles``."""
        from elastune.train.checkpoints.checkpoint import set_aside

        set_aside(run / "checkpoints", steps)

    def size_bytes(self, run: Path) -> int:
        """See ``RunFiles``."""
        return sum(path.lstat().st_size for path in run.rglob("*") if path.is_file() and not path.is_symlink())

    def seal(self, run: Path, step: int) -> str:
        """See ``RunFiles``."""
        from elastune.train.checkpoints.checkpoint import of_step, seal_of

        return seal_of(of_step(run / "checkpoints", step))

    def predictions(self, run: Path) -> dict[str, str]:
        """See ``RunFiles``."""
        from elastune.train.predictions import kept_in

        return kept_in(run)

    def remove(self, run: Path) -> None:
        """See ``RunFiles``."""
        # At once: where a controller is killed in the middle, the next one must not take what is left for a trial.
        with suppress(OSError):
            (run / "checkpoints").rename(run / "checkpoints.gone")
        shutil.rmtree(run, ignore_errors=True)
