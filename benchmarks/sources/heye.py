"""What Heye asked and measured at Cray, beside what was measured here.

His figures are those that stand in this repository: seconds and speed-ups of table 1, the random search, the sizes and
the two ends of the combined table. The rows between them are not given here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.sources.compared import NOT_GIVEN, SAME_RATIO, Document, Ours, Row, Section, about, about_percent

SECONDS = {"baseline": 1090, "split": 718, "data": 310}
SPEED_UPS = {"baseline": 1.0, "split": 1.5, "data": 3.5}
CASES = {
    "baseline": "one node",
    "split": "model split over 4",
    "trunk": "the same, trunk data parallel",
    "data": "data parallel on 4",
}
RANDOM_SHARE, RANDOM_RUNS, RANDOM_BEST = 0.1, 5000, 98.63
SEARCH = "2 x 32, synchronous"
"""Two demes of 32 that wait for their generations, as Heye's search has."""
PRODUCT = {"random search": "1 x", "genetic + both (all)": "56 x"}
SIZES = {"8x4x4": "128 nodes, batch x 4", "16x16x8": "2,048 nodes"}
SHOWN = ("model + data parallel", "random + both", "genetic + both (all)")
MULTIPLY = "1 if they multiply"


def split(result: Any) -> Iterator[Row]:
    """Table 1: one model on four nodes, split or replicated."""
    for row in result["rows"]:
        case = row["case"]
        cells = (str(SECONDS.get(case, NOT_GIVEN)), str(SPEED_UPS.get(case, NOT_GIVEN)))
        given = about(SPEED_UPS[case]) if case in SPEED_UPS else None
        ours = Ours(row["speedup"], (row["lowest"], row["highest"]), result["rounds"])
        name = f"{CASES[case]}, {row['link']}"
        yield Row(name, cells, (f"{row['step_ms']:.0f}",), given, ours, "emulated", case == "baseline")


def genetic(result: Any) -> Sequence[Row]:
    """Table 2: a genetic search on 1 to 64 nodes. Speed-ups are over a random search on one node."""
    rows = []
    for nodes, cell in result["searches"].get(SEARCH, {}).items():
        cells = (
            f"{cell['generations']}",
            f"{cell['runs']} ± {cell['runs_ci']:.1f}",
            f"{cell['seconds']:.0f}",
            f"{100 * cell['accuracy']:.2f}",
        )
        ours = Ours(cell["speed_up"], None, cell["searches"])
        rows.append(Row(_nodes(int(nodes)), (NOT_GIVEN,), cells, None, ours, "replayed"))
    measured = "1 and 2 nodes, MNIST, real trainings"
    return [*rows, Row(measured, (NOT_GIVEN,), ("",) * 4, None, None, "measured")]


def random_search(result: Any) -> Iterator[Row]:
    """What random configurations reach, each trained once."""
    tried, share = result["random_configurations"]["tried"], result["random_configurations"]
    ours = Ours(100 * share["share"], (100 * share["low"], 100 * share["high"]), tried)
    name = "trainings that reach 98.6 %, in %"
    yield Row(name, (str(RANDOM_SHARE), f"{RANDOM_RUNS:,}"), (), about(RANDOM_SHARE), ours, "measured")
    table = result["trainings"]
    best = max(row[table["columns"].index("accuracy")] for row in table["rows"])
    ours = Ours(100 * best, None, tried)
    given = about_percent(RANDOM_BEST)
    yield Row("best accuracy, %", (str(RANDOM_BEST), f"{RANDOM_RUNS:,}"), (), given, ours, "measured")


def combined(result: Any) -> Iterator[Row]:
    """Table 3: each technique's speed-up multiplied, over what they bring together."""
    for row in result["combined"]:
        by_seed = row["speed_up_by_seed"]
        product, measured = row["speed_up_multiplied"], row["speed_up_measured"]
        ours = None
        if product is not None and measured:
            ours = Ours(product / measured, (product / by_seed["most"], product / by_seed["least"]), len(row["seeds"]))
        cells = (f"{row['batch']}", f"{row['batch_of_the_seed']}", f"{row['runs']:.1f}", _x(product), _x(measured))
        # A genetic search alone is one of the factors: its product is its own speed-up.
        base = row["nodes"] == 1 or (row["width"] == row["nodes"] and row["row"] == "genetic")
        document = (PRODUCT.get(row["row"], NOT_GIVEN), "base" if base else MULTIPLY)
        yield Row(f"{row['row']}, {_nodes(row['nodes'])}", document, cells, about(1.0), ours, "emulated", base)


def at_scale(result: Any) -> Iterator[Row]:
    """The same by replay, at the size that was measured and at Heye's."""
    sizes: dict[str, Sequence[Mapping[str, Any]]] = {
        "as measured": result.get("replayed", []),
        **result.get("at_scale", {}),
    }
    for size, rows in sizes.items():
        for row in rows:
            if row["row"] in SHOWN and row["speed_up_multiplied"] is not None and row["speed_up_simulated"]:
                product, simulated = row["speed_up_multiplied"], row["speed_up_simulated"]
                ours = Ours(product / simulated, None, int(row["reached"].split(" of ")[1]))
                cells = (f"{row['batch_of_the_seed']}", f"{row['runs_simulated']:.1f}", _x(product), _x(simulated))
                document = (SIZES.get(size, ""), MULTIPLY)
                name = f"{size}: {row['row']}, {_nodes(row['nodes'])}"
                yield Row(name, document, cells, about(1.0), ours, "replayed")


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count:,} nodes"


def _x(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def do_they_multiply(result: Any) -> str:
    """The answer, from the rows that a search's luck does not reach and from those that it does."""
    rows = {row["row"]: row for row in result["combined"]}
    if not all(rows.get(name, {}).get("speed_up_multiplied") for name in ("model + data parallel", "genetic")):
        return ""
    both, luck = rows["model + data parallel"], rows["genetic"]
    last = rows.get("genetic + both (all)")
    steps = {row["mesh"]: row["speed_up_of_steps"]["median"] for row in result.get("single_techniques", [])}
    by_seed = both["speed_up_by_seed"]
    one, other = f"data={both['mesh'].partition('data=')[2][:1]}", f"tensor={both['mesh'].partition('tensor=')[2][:1]}"
    product, measured = both["speed_up_multiplied"], both["speed_up_measured"]
    answer = (
        "**Do the speed-ups multiply?** Data and model parallelism: "
        + ("no" if product / measured > SAME_RATIO else "yes, within a quarter")
        + f". Together they bring {measured:.2f} and not {product:.2f}, in each of {len(both['seeds'])} searches "
        f"({by_seed['least']:.2f} to {by_seed['most']:.2f}). Both sides run the same {both['runs']:.1f} trainings: no "
        "luck of a search is in this row."
    )
    if one in steps and other in steps:
        answer += (
            f" The steps alone are {steps[one]:.2f} and {steps[other]:.2f} times as fast with each; the cause of the "
            "rest is not known."
        )
    luck_of = luck["speed_up_by_seed"]
    answer += (
        f" Search and parallel training: not shown. The same genetic search brings {luck_of['least']:.2f} to "
        f"{luck_of['most']:.2f} by seed, and every row with it has that luck in it."
    )
    replay = {row["row"]: row for row in result.get("replayed", [])}.get("genetic + both (all)")
    if last and replay:
        answer += (
            f" The last row needed {last['runs']:.0f} trainings with {len(last['seeds'])} seeds; a replay with many "
            f"seeds needs {replay['runs_simulated']:.1f} and has {replay['speed_up_simulated']:.2f} where multiplying "
            f"has {replay['speed_up_multiplied']:.2f}. But its seconds are the planner's, "
            f"which expects {both['speed_up_predicted']:.2f} of the two meshes where {measured:.2f} was measured."
        )
    return answer


HEYE = Document(
    "Heye (Cray, CUG 2018)",
    "What do data parallelism, a split model and a genetic search bring, each by itself and multiplied?",
    "Heye left the test of the product to future work.",
    (
        Section(
            "Table 1: one training on four nodes",
            "A whole training on nodes of a Cray there; here 8 steps on made images, compute paced to 1 GFLOP/s: no "
            "accuracy.",
            "splits",
            "python -m benchmarks.parallel.splits",
            "speed-up",
            "least to most of rounds",
            "rounds",
            ("seconds", "speed-up"),
            ("ms a step",),
            lambda result: list(split(result)),
            ("src/elastune/parallel", "benchmarks/parallel"),
        ),
        Section(
            "Table 2: a genetic search on 1 to 64 nodes",
            "A continuum of configurations there; here 180, each trained once, and searches are replayed over them.",
            "genetic_mnist",
            "python -m benchmarks.sources.genetic_mnist",
            "speed-up over random on one node",
            "none in the result",
            "searches",
            ("speed-up",),
            ("generations", "runs", "seconds", "accuracy, %"),
            genetic,
            ("src/elastune/tuning", "benchmarks/sources"),
        ),
        Section(
            "The random search that table 2 begins with",
            "5,000 draws of a continuum there; here a grid of 180, whose learning rates are near those that work.",
            "genetic_mnist",
            "python -m benchmarks.sources.genetic_mnist",
            "ours",
            "95 % (Wilson)",
            "trainings",
            ("figure", "trainings"),
            (),
            lambda result: list(random_search(result)),
            ("src/elastune/tuning", "benchmarks/sources"),
        ),
        Section(
            "Table 3: techniques combined",
            "Products on paper there; here up to 8 paced workers and trainings of ten steps to about 75 %. "
            "There the batch grows with data parallelism, here it stays.",
            "combined",
            "python -m benchmarks.sources.combined --minutes 34",
            "product over measured",
            "product over the most to product over the least of a seed",
            "seeds",
            ("multiplied", "product over measured"),
            ("batch", "Heye's batch", "trainings", "multiplied", "measured"),
            lambda result: list(combined(result)),
            ("src/elastune/tuning", "src/elastune/parallel", "src/elastune/core/plan", "benchmarks/sources"),
        ),
        Section(
            "Table 3 at Heye's sizes, by replay",
            "Trainings until the target are replayed, their seconds are the planner's. Nothing ran at these sizes.",
            "combined",
            "python -m benchmarks.sources.combined --minutes 34",
            "product over simulated",
            "none in the result",
            "searches",
            ("size", "product over measured"),
            ("Heye's batch", "trainings", "multiplied", "simulated"),
            lambda result: list(at_scale(result)),
            ("src/elastune/tuning", "src/elastune/core/plan", "benchmarks/sources"),
            2,
            do_they_multiply,
        ),
    ),
)
