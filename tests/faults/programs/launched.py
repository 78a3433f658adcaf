"""A worker that nobody but its launcher knows: its order comes on stdin, and nothing goes back."""

from __future__ import annotations

import os
import sys

from elastune.cluster.wire import decode_order
from elastune.train.work import work

if __name__ == "__main__":
    order = decode_order(sys.stdin.buffer.readline())
    os._exit(work(order.spec, order.place, lambda record: None, lambda: False))
