"""Refuses what starts or joins other processes in a program: elastune does both."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError

_OURS = Path(__file__).parents[2]
_INSTALLED = ("site-packages", "dist-packages")


@contextmanager
def launchers_refused() -> Iterator[None]:
    """Refuse ``init_process_group`` and ``DistributedDataParallel`` of the user's own lines while the block runs.

    Calls by elastune and installed packages stay as they are, and a wrapper over a ``process_group`` of the program's
    own. Without torch in this process there is nothing to do.

    Raises:
        UserError: For such a line, which it names.
    """
    if "torch" not in sys.modules:
        yield
        return
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    places: list[tuple[Any, str, str, str]] = [
        (dist, "init_process_group", "init_process_group", "remove the call: the workers have their group already"),
        (
            DistributedDataParallel,
            "__init__",
            "DistributedDataParallel",
            "give session.prepare the model itself, and remove the wrapper",
        ),
    ]
    if hasattr(dist, "distributed_c10d"):
        places.append((dist.distributed_c10d, *places[0][1:]))
    kept = [(home, name, getattr(home, name)) for home, name, _, _ in places]
    for (home, name, rule, fix), (_, _, call) in zip(places, kept, strict=True):
        setattr(home, name, _refusing(call, rule, fix))
    try:
        yield
    finally:
        for home, name, call in kept:
            setattr(home, name, call)


def _refusing(call: Callable[..., Any], broken_rule: str, fix: str) -> Callable[..., Any]:
    @wraps(call)
    def refuse(*args: Any, **options: Any) -> Any:
        if options.get("process_group") is not None:  # beside the training, on a group that the program has made
            return call(*args, **options)
        line = line_of_user(sys._getframe(1).f_code.co_filename, sys._getframe(1).f_lineno)
        if line:
            rule = "elastune starts the workers and sums their gradients, so a program must do neither"
            raise UserError(rule, f"{broken_rule} at {line}", fix)
        return call(*args, **options)

    return refuse


def line_of_user(file: str, line: int) -> str:
    """``train.py:12`` for a line of the user's own file; "" for one of elastune, Python or an installed package."""
    path = Path(file)
    standard = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")}
    if file.startswith("<") or any(part in _INSTALLED for part in path.parts):
        return ""
    return "" if {_OURS, *standard} & {*path.parents} else f"{path.name}:{line}"
