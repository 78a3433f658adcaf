"""What a run does at most once, whoever dies and however often it is resumed: who is to do it says so in a file first.

A mark is made before the effect. So a worker that is killed between both leaves an effect that was perhaps not done, or
half; none that is done twice.
"""

from __future__ import annotations

import os

from elastune.core.errors import UserError
from elastune.train.checkpoints.home import OutFolder

FOLDER = "once"


def claim(home: OutFolder, name: str, who: str) -> bool:
    """Whether this is the first call for ``name`` in the life of the run whose folder ``home`` is.

    The disk has the mark, ``once/NAME``, before this returns; it says ``who`` made it.

    Raises:
        UserError: Where the folder cannot be written.
    """
    folder = home.path / FOLDER
    try:
        home.make(folder)
        try:
            mark = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            with open(mark, "wb") as file:
                file.write(f"{who}\n".encode())
                file.flush()
                os.fsync(file.fileno())
            there = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(there)
            finally:
                os.close(there)
        except OSError:  # on a full disk a name may be made, and nothing written: nothing was begun
            (folder / name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError("a run's folder must be writable", error, "free space, or use another --out") from None
    return True
