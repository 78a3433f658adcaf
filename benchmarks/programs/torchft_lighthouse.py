"""torchft's lighthouse until standard input ends: torchft_lighthouse.py HEARTBEAT_MS JOIN_MS TICK_MS"""

import sys

from torchft.coordination import LighthouseServer

if __name__ == "__main__":
    heartbeat, join, tick = map(int, sys.argv[1:])
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=join, quorum_tick_ms=tick, heartbeat_timeout_ms=heartbeat
    )
    print(server.address(), flush=True)
    sys.stdin.read()
    server.shutdown()
