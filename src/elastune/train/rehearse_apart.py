"""A program's rehearsal in a process of its own: fake tensors that somebody caches, as of a data set, end with it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.run import Config, Program
from elastune.train.program.load import load
from elastune.train.rehearsal import ProgramSize, rehearse


def rehearse_apart(program: Program, config: Config, seed: int = 0) -> ProgramSize:
    """As ``rehearse``; what the program prints goes to stderr.

    Raises:
        UserError: Where the program fails, with its own error, or its process dies.
    """
    with tempfile.TemporaryDirectory(prefix="elastune-rehearsal-") as folder:
        asked, told = Path(folder) / "asked.json", Path(folder) / "told.json"
        asked.write_text(
            json.dumps({"path": str(program.path), "train": program.train, "config": config, "seed": seed})
        )
        command = [sys.executable, "-m", "elastune.train.rehearse_apart", str(asked), str(told)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), check=False)
        if done.returncode != 0 or not told.exists():
            value = f"exit code {done.returncode}"
            raise UserError(
                "a program's rehearsal must come to its end", value, "see what it printed; is memory short?"
            )
        found = json.loads(told.read_text())
    if "error" in found:
        raise UserError(*found["error"])
    found |= {name: tuple(told) for name, told in found.items() if isinstance(told, list)}
    return ProgramSize(**found)


def main() -> int:
    """The process: reads what is asked from its first argument, writes the answer to its second."""
    asked, told = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    program = Program(Path(asked["path"]), asked["train"])
    try:
        answer = asdict(rehearse(load(program), program, asked["config"], asked["seed"]))
    except UserError as error:
        answer = {"error": error.told}
    told.write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
