"""The device that a worker computes on, set so that in ``exact`` mode a kernel gives the same bits each time."""

from __future__ import annotations

import os
import re

import torch

from elastune.core.errors import UserError
from elastune.core.run import Means, Place
from elastune.elastic.worker.host_name import host_name
from elastune.train.program.causes import text_of

_UNORDERED = re.compile(r"(\S+) does not have a deterministic implementation")


def set_up_device(means: Means, place: Place) -> torch.device:
    """The device at ``place``, for this process.

    On a GPU ``exact`` mode lets torch use deterministic kernels only; what has none fails (``unordered_kernel``). A
    mere warning would not do: under torch's ``warn_only`` attention in fp32 adds in any order. TF32 stays as torch or
    the program sets it: it rounds more, and equally on every worker. Raises ``UserError`` where it cannot be used.
    """
    torch.set_num_threads(means.threads)
    device = torch.device(place.device)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
        try:
            torch.cuda.set_device(device)
        except (AssertionError, AttributeError, RuntimeError) as error:  # the first two: of a torch without CUDA
            why = f"{device} of host {host_name()}: {text_of(error).partition(chr(10))[0]}"
            fix = "look at nvidia-smi there, or use --device cpu"
            raise UserError("a worker must be able to use the device that it was given", why, fix) from None
        if means.mode == "exact":
            torch.backends.cudnn.benchmark = False  # it picks the kernel that is fastest just now
            torch.use_deterministic_algorithms(True)
            # Only for those who read what nobody has written, at the price of a write more of each new tensor.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return device


def unordered_kernel(error: BaseException) -> UserError | None:
    """What to say of an operation that ``exact`` mode cannot do on a GPU, where ``error`` is of that."""
    found = _UNORDERED.search(text_of(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    rule = "exact mode on a GPU needs operations that add in one order"
    return UserError(rule, found[1], "use another operation, or --mode fast")
