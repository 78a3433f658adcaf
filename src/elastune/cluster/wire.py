"""What a controller and its workers say to each other: JSON, one object a line, over a Unix socket.

Controller to worker: one ``WorkerSpec``, then perhaps ``STOP``. Worker to controller: the records of its run
(``journal.records``), and a ``farewell`` with its exit code when its entry point has ended: a process that ends without
one was killed, has crashed or has called ``os._exit``. The end of the stream is a message too: the other side has gone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from elastune.core.run import Adapt, Elastic, Means, Place, Program, RunSpec

STOP = b'{"stop":true}\n'
_FAREWELL = b'{"farewell":'


@dataclass(frozen=True)
class WorkerSpec:
    """What one worker is to do, and the surroundings to do it in.

    ``entry`` is the ``module:function`` to call; ``environment`` the whole environment; ``folder`` the working
    directory; ``import_path`` Python's ``sys.path``. They are the controller's, as at the start of the run: the fork
    server may be older.
    """

    entry: str
    spec: RunSpec
    place: Place
    environment: dict[str, str]
    folder: str
    import_path: list[str]


def encode_order(order: WorkerSpec) -> bytes:
    """One line of JSON with its line end. Raises ``TypeError`` where the configuration holds what JSON cannot."""
    return json.dumps(asdict(order), default=_path_as_text).encode() + b"\n"


def decode_order(line: bytes) -> WorkerSpec:
    """The order in ``line``, as ``encode_order`` wrote it."""
    fields = json.loads(line)
    spec = fields["spec"]
    program = Program(Path(spec["program"]["path"]), spec["program"]["train"])
    known = {"program": program, "out": Path(spec["out"]), "means": Means(**spec["means"])}
    known["parent"] = None if spec["parent"] is None else Path(spec["parent"])
    known["elastic"] = Elastic(**spec["elastic"])
    known["adapt"] = Adapt(**{name: tuple(texts) for name, texts in spec["adapt"].items()})
    return WorkerSpec(**{**fields, "spec": RunSpec(**{**spec, **known}), "place": Place(**fields["place"])})


def encode_farewell(code: int) -> bytes:
    """The last line of a worker that ends by itself."""
    return b"%s%d}\n" % (_FAREWELL, code)


def decode_farewell(line: bytes) -> int | None:
    """The exit code in ``line``; None where it is something else."""
    number = line.removeprefix(_FAREWELL).removesuffix(b"}")
    return int(number) if line.startswith(_FAREWELL) and number.lstrip(b"-").isdigit() and len(number) < 12 else None


def _path_as_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} is not JSON")
