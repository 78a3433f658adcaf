"""The shape of the house: who may import whom, and what may stand nowhere."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import elastune

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "elastune"
# Imports go one way: a room imports only from rooms before it.
ROOMS = (
    *("core", "core.journal", "core.plan"),
    *("parallel.comm", "parallel.mechanisms", "parallel.sync"),
    "elastic",
    *("adapt.monitors", "adapt.policies"),
    *("recipes", "train", "runtime"),
    *("tuning.search", "tuning.study", "tuning.frontier", "tuning.cluster_plan", "tuning.simulate", "tuning.reuse"),
    *("optuna", "report", "loggers", "dashboard", "adapters", "cli"),
)
LEAVES = {"loggers"}  # whose files are found by their names: no other room imports them
ANYWHERE = "testing"  # may import every room; no room imports it
FRONT_DOORS = {"__init__": (*ROOMS,), "__main__": ("cli",)}
LONGEST_FILE = 800
# A story that is one: the step, the session.
LONGEST_STORY = 1200
STORIES = {"train/step.py", "train/session.py"}
# What core may have of the standard library: nothing that reads, writes, sleeps on or starts anything.
CORE_MAY = {
    *(
        "__future__",
        "abc",
        "bisect",
        "collections",
        "dataclasses",
        "difflib",
        "enum",
        "functools",
        "hashlib",
        "inspect",
        "itertools",
    ),
    *("json", "math", "numbers", "operator", "pathlib", "re", "struct", "time", "types", "typing"),
}
# One file of core reads the names of installed packages, which imports of other packages would read likewise.
PLUGINS_MAY = {"importlib", "sys"}
# Names that two classes still share. The list only shrinks.
NAMES_OF_TWO = {"Bounds", "Confirm", "Decisions", "Injector", "Named", "Part", "Progress", "Run", "Training", "Worker"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads"),
    *("shelve.open", "os.system", "os.popen", "yaml.load", "joblib.load", "dill.load", "dill.loads"),
}
MACHINE_PATHS = re.compile(r"(?<![\w.$~{}-])/(?:root|home|work|Users|mnt|opt)/\w")


@cache
def parsed(text: str) -> ast.Module:
    """The tree of a file's text: most tests here walk those of all files."""
    return ast.parse(text)


def sources(package: Path = PACKAGE) -> list[Path]:
    return sorted(package.rglob("*.py"))


def room_of(file: Path, package: Path = PACKAGE) -> str:
    """The room of ``file``; of files beside the rooms, their name."""
    return room_named(".".join(file.relative_to(package).with_suffix("").parts))


def room_named(module: str) -> str:
    """The room of ``module`` ("core.journal.reader"): the longest name in ROOMS that begins it, or its first part."""
    rooms = [room for room in ROOMS if f"{module}.".startswith(f"{room}.")]
    return max(rooms, key=len) if rooms else module.partition(".")[0]


def imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Every module that ``tree``, a module in ``package``, imports, in full; ``from a import b`` may mean ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def broken_imports(file: Path, text: str, package: Path = PACKAGE) -> list[str]:
    """The imports of other rooms that ``file`` must not have, each in words."""
    room = room_of(file, package)
    inside = ("elastune", *file.relative_to(package).parts[:-1])
    found = []
    for module in imports(parsed(text), inside):
        head, _, rest = module.partition(".")
        if head != "elastune":
            continue
        other = room_named(rest)
        if other == room or room == ANYWHERE:
            continue
        if room in FRONT_DOORS:
            allowed = other in FRONT_DOORS[room]
        else:
            allowed = other in ROOMS and other not in LEAVES and ROOMS.index(other) < ROOMS.index(room)
        if not allowed:
            found.append(f"{room} imports {other or 'elastune'} ({module})")
    return found


def graph_of_imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Which files of ``package`` import which, inside functions and for type checkers too; front doors left out."""
    files = {f"{package.name}." + ".".join(f.relative_to(package).with_suffix("").parts): f for f in sources(package)}
    files = {name: file for name, file in files.items() if file.stem not in FRONT_DOORS}
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        inside = (package.name, *file.relative_to(package).parts[:-1])
        wanted = {part for module in imports(parsed(file.read_text()), inside) for part in prefixes(module)}
        found[name] = (wanted & files.keys()) - {name}
    return found


def prefixes(module: str) -> set[str]:
    """``a.b.c`` and ``a.b``: whichever of them is a file."""
    return {module, module.rpartition(".")[0]}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Files that import each other, directly or through others."""
    reach = {name: reachable(graph, name) for name in graph}
    found = {frozenset({b for b in reach[a] if a in reach[b]}) for a in graph if a in reach[a]}
    return sorted(sorted(circle) for circle in found)


def reachable(graph: dict[str, set[str]], begin: str) -> set[str]:
    """Every file that ``begin`` imports, directly or through others."""
    seen: set[str] = set()
    todo = list(graph[begin])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def broken_calls(text: str) -> list[str]:
    """Calls that could run what they read, each in words."""
    found = []
    for name, call in calls(parsed(text)):
        if name in FORBIDDEN_CALLS or name.endswith((".pickle.load", ".pickle.loads")):
            found.append(f"line {call.lineno}: {name}")
        keywords = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if keywords.get("shell", "False") != "False":
            found.append(f"line {call.lineno}: shell={keywords['shell']}")
        if name == "torch.load" and keywords.get("weights_only") != "True":
            found.append(f"line {call.lineno}: torch.load without weights_only=True")
    return found


def tracked() -> list[Path]:
    """The files of the repository: those in git, or all where there is no git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    places = [ROOT / name for name in ("src", "tests", "examples", "benchmarks", "docs", ".ci")]
    return [file for place in places for file in place.rglob("*") if file.is_file() and "__pycache__" not in file.parts]


def test_every_folder_is_a_room() -> None:
    rooms = {*ROOMS, ANYWHERE}
    homeless = [file for file in sources() if file.stem not in FRONT_DOORS and room_of(file) not in rooms]
    assert not homeless, "give a new room its place in ROOMS and in docs/architecture.md"
    stray = {file.stem for file in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert not stray, "every file stands in a room"


def test_every_file_keeps_the_rules() -> None:
    broken = []
    for file in sources():
        name, text = str(file.relative_to(PACKAGE)), file.read_text()
        longest = LONGEST_STORY if name in STORIES else LONGEST_FILE
        broken += [f"{name}: {each}" for each in [*broken_imports(file, text), *broken_calls(text)]]
        broken += [f"{name}: more than {longest} lines"] if text.count("\n") > longest else []
    assert broken == []


def test_no_folder_hides_a_public_name() -> None:
    """A package becomes an attribute of ``elastune`` as soon as somebody imports it."""
    public = set(elastune.__all__) - {"datasets"}  # which is a module itself
    assert not public & {path.stem for path in PACKAGE.iterdir()}


def test_no_folder_has_more_than_twenty_files() -> None:
    files = Counter(file.parent for file in sources() if file.name != "__init__.py")
    assert [str(folder.relative_to(PACKAGE)) for folder, number in files.items() if number > 20] == []


def test_no_two_files_import_each_other() -> None:
    assert circles(graph_of_imports()) == []


def test_core_is_pure() -> None:
    """The files of core itself, not those of its journal and its planner."""
    broken = []
    for file in sorted((PACKAGE / "core").glob("*.py")):
        tree = parsed(file.read_text())
        heads = {module.partition(".")[0] for module in imports(tree, ("elastune", "core"))} - {"elastune"}
        names = {name for name, _ in calls(tree)}
        reading = (".read_text", ".write_text", ".read_bytes", ".sleep")
        acting = ({"open", "print", "input"} & names) | {name for name in names if name.endswith(reading)}
        may = CORE_MAY | PLUGINS_MAY if file.name == "plugins.py" else CORE_MAY
        broken += [f"{file.name}: {name}" for name in sorted((heads - may) | acting)]
    assert broken == []


def test_no_file_names_this_machine() -> None:
    named = []
    for file in tracked():
        try:
            lines = file.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        named += [
            f"{file.relative_to(ROOT)}:{i}: {line.strip()}"
            for i, line in enumerate(lines, 1)
            if MACHINE_PATHS.search(line)
        ]
    assert named == []


def test_no_two_public_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = {}
    for file in sources():
        for node in parsed(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert set(shared) <= NAMES_OF_TWO, shared


@pytest.mark.parametrize(
    ("file", "text", "broken"),
    [
        ("core/a.py", "from elastune.core.b import c", False),
        ("core/a.py", "from elastune.core.journal.records import c", True),
        ("core/a.py", "import elastune.train", True),
        ("core/a.py", "from elastune import train", True),
        ("core/a.py", "from ..train import session", True),
        ("core/a.py", "from . import slots", False),
        ("core/a.py", "def f():\n    from elastune.cli import main", True),
        ("core/a.py", "if TYPE_CHECKING:\n    from elastune.runtime.job.run import x", True),
        ("cli/a.py", "from elastune.report import page", False),
        ("cli/a.py", "from elastune.testing import kit", True),
        ("cli/a.py", "from elastune.nowhere import x", True),
        ("cli/a.py", "from elastune.loggers.csv import x", True),
        ("train/a.py", "from elastune.tuning.search import space", True),
        ("tuning/search/a.py", "from elastune.train.program import load", False),
        ("testing/a.py", "from elastune.cli import main", False),
        ("__init__.py", "from elastune.tuning.study.run import tune", False),
        ("__init__.py", "from elastune.testing.kit import x", True),
        ("__main__.py", "from elastune.runtime.job.run import x", True),
    ],
)
def test_the_import_rule_finds_what_it_should(file: str, text: str, broken: bool) -> None:
    assert bool(broken_imports(PACKAGE / file, text)) == broken


def test_the_circle_rule_finds_what_it_should(tmp_path: Path) -> None:
    package = tmp_path / "elastune"
    package.mkdir()
    (package / "a.py").write_text("def f():\n    from elastune.b import x")
    (package / "b.py").write_text("import elastune.c")
    (package / "c.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import a, d")
    (package / "d.py").write_text("import os")
    graph = graph_of_imports(package)
    assert graph["elastune.c"] == {"elastune.a", "elastune.d"}
    assert circles(graph) == [["elastune.a", "elastune.b", "elastune.c"]]


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("pickle.loads(x)", True),
        ("eval('1')", True),
        ("model.eval()", False),
        ("ast.literal_eval(x)", False),
        ("subprocess.run(x, shell=True)", True),
        ("subprocess.run(x, shell=flag)", True),
        ("subprocess.run(x)", False),
        ("torch.load(x)", True),
        ("torch.load(x, weights_only=True)", False),
    ],
)
def test_the_call_rule_finds_what_it_should(text: str, broken: bool) -> None:
    assert bool(broken_calls(text)) == broken


def test_the_path_rule_finds_what_it_should() -> None:
    found = [
        text
        for text in ("a /ro" + "ot/x", '"/ho' + 'me/me"', "see /us" + "r/share/x", "a/ho" + "me/b")
        if MACHINE_PATHS.search(text)
    ]
    assert len(found) == 2


# Clocks that somebody may set while we look: none of them decides when something is over, or what came first.
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow"}
READS_THEM = {
    "core/clock.py": "one's own, for people, and for prices that have dates",
    "cli/progress.py": "for people",
    "runtime/clusters/fork.py": "for people",
    "runtime/job/output.py": "the name of a folder",
    "runtime/agents/host_report.py": "doctor compares clocks",
    "runtime/agents/launcher.py": "doctor compares clocks",
    "runtime/clusters/slurm_commands.py": "doctor compares clocks",
    "runtime/agents/credentials.py": "a certificate has dates; nobody asks for them",
    "runtime/clusters/ray_actor.py": "Ray tells a date",
    "optuna/pruner.py": "orders reports of several hosts, as Optuna's dates order the ends of trials",
}


def test_only_clocks_that_go_forward_decide() -> None:
    told = {
        str(file.relative_to(PACKAGE)): {name for name, _ in calls(parsed(file.read_text()))} & WALL_CLOCKS
        for file in sources()
    }
    assert {file for file, found in told.items() if found and not file.startswith("testing/")} == set(READS_THEM)
