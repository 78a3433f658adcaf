"""The commands in a block of shell, in words."""

from __future__ import annotations

import re
import shlex

from tests.pages.blocks import Block

ASSIGNMENT = re.compile(r"^[A-Z_]+=")
STARTERS = re.compile(r"^(?:salloc|torchrun|srun|mpirun|ray job submit)\b.*?(?=elastune )")


def lines(block: Block) -> list[str]:
    """The lines of a block as a shell reads them: without comments, continued ones joined."""
    joined = re.sub(r"\\\n\s*", " ", block.code)
    joined = re.sub(r"<<'(\w+)'\n.*?\n\1\n", "\n", joined, flags=re.DOTALL)
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def elastune_commands(block: Block) -> list[list[str]]:
    """The words of each ``elastune COMMAND``, behind ``elastune``."""
    found = []
    for line in lines(block):
        for part in re.split(r" && | \|\| | & ?$", line):
            words = shlex.split(STARTERS.sub("", part), comments=True)
            while words and ASSIGNMENT.match(words[0]):
                words = words[1:]
            if words and words[0] == "elastune":
                cut = next((place for place, word in enumerate(words) if word in (">", "|", "&")), len(words))
                found.append(words[1:cut])
    return found
