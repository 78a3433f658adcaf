"""What the end of a worker's process says of the program that ran in it."""

from __future__ import annotations

from elastune.cluster.launcher import ProcessEnded
from elastune.elastic.worker.last_resort import DISCONNECTED_CODE, ORPHANED_CODE

NOT_STARTED = 71  # EX_OSERR of sysexits.h


def ended_itself(end: ProcessEnded) -> str:
    """What the program did to end its worker's process without a word; "" where it was something else that ended it."""
    if end.why or end.code is None or end.code < 0 or end.code in (ORPHANED_CODE, NOT_STARTED):
        return ""
    if end.code == DISCONNECTED_CODE:
        return "the program closed its worker's connection, a file that it had not opened (os.closerange?)"
    return f"the program ended its worker's process with exit code {end.code} (os._exit, or a library that exits)"
