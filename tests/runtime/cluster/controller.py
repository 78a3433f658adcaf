"""A controller to be killed: ``python controller.py OUT HOW``. Prints its cluster's processes, then ends by HOW."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from elastune.runtime.clusters.local import LocalCluster
from elastune.testing.kits.cluster import events_until_end, events_until_messages, exits, reports, spec_of


def main(out: Path, how: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background
    sys.path.append(str(Path(__file__).parent))
    cluster = LocalCluster(2, entry="odd_workers:with_family", preload=["torch"] if how == "early" else [])
    if how == "early":
        print(cluster.launcher.server().pid, flush=True)
        time.sleep(100)
    handle = cluster.start(spec_of(out, 2))
    members = [int(pid) for r in reports(events_until_messages(cluster, handle, 2)) for pid in r.metrics.values()]
    try:
        print(cluster.launcher.server().pid, *members, flush=True)
        if how == "exception":
            raise RuntimeError("controller")
        if how == "_exit":
            os._exit(0)
        if how != "return":
            cluster.wait(100)
    except KeyboardInterrupt:
        handle.stop()
        print(*(end.code for end in exits(events_until_end(cluster, handle)).values()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
