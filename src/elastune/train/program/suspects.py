"""Lines of a program that may make it differ from run to run, or from worker to worker. Nothing is run for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

# What draws from the machine and not from a stream that the run seeds; those of WITHOUT_SEED only without arguments.
UNSEEDED = ("os.urandom", "uuid.uuid1", "uuid.uuid4", "random.SystemRandom", "torch.seed", "time.time", "time.time_ns")
WITHOUT_SEED = ("default_rng", "RandomState", "random.Random", "random.seed", "SeedSequence")
OF_WORKERS = ("rank", "size", "leader", "process_index", "is_main_process", "local_process_index")


def unseeded(text: str) -> list[int]:
    """The lines that draw what no seed decides."""
    return sorted({call.lineno for call in _calls(text) if _draws(call)})


def of_workers(text: str) -> list[int]:
    """The lines that ask who a worker is, or how many there are."""
    tree = ast.parse(text)
    found = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _asks(node)}
    return sorted(
        found | {call.lineno for call in _calls(text) if _name(call).endswith(("get_rank", "get_world_size"))}
    )


def _calls(text: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _draws(call: ast.Call) -> bool:
    name = _name(call)
    if name.startswith("secrets.") or name in UNSEEDED:
        return True
    return not call.args and not call.keywords and name.endswith(WITHOUT_SEED)


def _asks(node: ast.Attribute) -> bool:
    return node.attr in OF_WORKERS and ast.unparse(node.value).endswith(("session", "accelerator"))
