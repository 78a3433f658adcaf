"""The kit, on both forms of all-reduce and on a toy that averages parameters every two steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

if str(Path(__file__).parent) not in sys.path:  # worker processes import it by its name
    sys.path.append(str(Path(__file__).parent))

from strategies import make_averaging, make_exact, make_fast

from elastune.testing.kits.sync import SyncKit


class TestExactAllReduce(SyncKit):
    make: ClassVar[Any] = staticmethod(make_exact)


class TestFastAllReduce(SyncKit):
    make: ClassVar[Any] = staticmethod(make_fast)


class TestAveraging(SyncKit):
    make: ClassVar[Any] = staticmethod(make_averaging)
