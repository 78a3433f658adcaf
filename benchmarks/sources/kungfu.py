"""What the authors of KungFu asked and measured, beside what was measured here.

Their figures are those that their repository prints: its README of the artifact (commit 0022e05, ``osdi20/README.md``)
and the vector graphic of its README (commit b1e1768, ``benchmarks/system/result/sync-scalability.svg``), whose bars
were read by their coordinates. The paper's own text was not at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.sources.compared import NOT_GIVEN, Document, Ours, Range, Row, Section, about, at_least, at_most

CURVE = "direction"
SMALL, LARGE = "fixed 32", ("fixed 512", "fixed 4096")
PER_GPU = {"none": 49.2, "noise scale": 48.7, "gradient variance": 47.4}
"""Images a second on a K80, by what is monitored (figure 8, four GPUs of one machine)."""
BEFORE, DURING, AFTER = 28.6, 19.2, 26.9
"""Images a second on a K80 before others' traffic, under it, and four iterations after the change (figure 5)."""
SCALING = {256: (1363, 687), 512: (2768, 1311), 1024: (4434, 2272), 2048: (5251, 3793), 4096: (5505, 5522)}
"""Images a second of KungFu and Horovod, ResNet-50 on 16 V100, by batch."""
ON_DEMAND, SPOT = 92_613, 15_152
"""Dollars for an epoch of Megatron-LM on 512 V100, on demand and on spot machines (slides)."""


def batches(result: Any) -> Iterator[Row]:
    """Test accuracy of a small, two large and the adaptive batch; the adaptive setting is the best on validation."""
    for data, sizes in result["results"].items():
        known = {row["name"]: row for row in sizes["16 workers"]["rows"] if row["decay"] == "none"}
        adaptive = max((row for row in known.values() if row["adaptive"]), key=lambda row: row["validation"])
        least = 100 * (known[SMALL]["test"] - known[SMALL]["test_ci"])
        yield _accuracy(data, f"static small ({SMALL})", known[SMALL], None, base=True)
        for name in LARGE:
            yield _accuracy(data, f"static large ({name})", known[name], at_most(least))
        yield _accuracy(data, f"adaptive ({adaptive['name']})", adaptive, at_least(least))


def _accuracy(data: str, name: str, row: Mapping[str, Any], given: Range | None, base: bool = False) -> Row:
    test, half = 100 * row["test"], 100 * row["test_ci"]
    ours = Ours(test, (max(0.0, test - half), min(100.0, test + half)), row["seeds"])
    says = "base" if base else f"{CURVE}: {'less' if 'large' in name else 'no less'} than small"
    return Row(f"{data}: {name}", (says,), (f"{row['seconds']:.1f}",), given, ours, "measured", base)


def switched(result: Any) -> Sequence[Row]:
    """Samples a second of the policy over those of each fixed strategy, pairs of equal seed."""
    size = result.get("size", {})
    if "sync_by_size" not in size:
        return []
    ours = size["sync_by_size"]
    rows = [
        Row("sync_by_size", ("base",), (f"{ours['whole']}",), None, _whole(ours, ours), "emulated", True),
    ]
    for name, other in size.items():
        if name != "sync_by_size":
            cells = (f"{other['whole']}",)
            given = at_least(1.0)
            rows.append(Row(f"over {name}", (f"{CURVE}: at least 1",), cells, given, _whole(ours, other), "emulated"))
    return rows


def _whole(ours: Mapping[str, Any], other: Mapping[str, Any]) -> Ours:
    ratios = [a / b for a, b in zip(ours["whole_of_seeds"], other["whole_of_seeds"], strict=False)]
    return Ours(ours["whole"] / other["whole"], (min(ratios), max(ratios)), len(ratios))


def routed(result: Any) -> Iterator[Row]:
    """What a change of the topology brings while a link is slow."""
    changed = AFTER / DURING
    for row in result["rows"]:
        if (row["links"], row["topology"]) == ("one slow", "auto"):
            ours = Ours(1 / row["ratio"], (1 / row["highest"], 1 / row["lowest"]), result["rounds"])
            cells = (str(BEFORE), str(DURING), str(AFTER), f"{changed:.2f}")
            yield Row(f"one slow link, {row['mode']}", cells, (f"{row['ms']:.0f}",), about(changed), ours, "emulated")


def scaled(result: Any) -> Iterator[Row]:
    """Throughput over Horovod, which is not measured here, and over DDP."""
    for batch, (kungfu, horovod) in SCALING.items():
        cells = (str(kungfu), str(horovod), f"{kungfu / horovod:.2f}")
        yield Row(f"batch {batch} over Horovod", cells, ("",), about(kungfu / horovod), None, "measured")
    for cell in result["cells"]:
        if "fast_over_ddp" in cell and cell["workers"] > 1:
            over = cell["fast_over_ddp"]
            low, high = over["quartiles"]
            ours = Ours(1 / over["median"], (1 / high, 1 / low), cell["rounds"])
            name = f"{cell['model']} over DDP, {cell['workers']} workers"
            cells = ("", "", "direction: at least 1")
            yield Row(name, cells, (f"{cell['ms']['fast']:.0f}",), at_least(1.0), ours, "measured")


def monitored(result: Any) -> Iterator[Row]:
    """Step time with a reading at every step over that without a monitor."""
    cost = PER_GPU["none"] / PER_GPU["noise scale"]
    for cell in result["cells"]:
        if cell["monitor"] == "noise_scale":
            over = cell["every_1_over_off_wall"]
            ours = Ours(over["median"], tuple(over["quartiles"]), cell["rounds"])
            cells = (str(PER_GPU["none"]), str(PER_GPU["noise scale"]), f"at most {cost:.3f}")
            workers = f"{cell['workers']} worker{'s' * (cell['workers'] > 1)}"
            name = f"noise scale, {cell['model']}, {workers}, {cell['mode']}"
            yield Row(name, cells, (f"{cell['wall_ms']['every_1']:.0f}",), at_most(cost), ours, "measured")
    cost = PER_GPU["none"] / PER_GPU["gradient variance"]
    cells = (str(PER_GPU["none"]), str(PER_GPU["gradient variance"]), f"at most {cost:.3f}")
    yield Row("gradient variance", cells, ("",), at_most(cost), None, "measured")


def hidden(result: Any) -> Iterator[Row]:
    """The share of an exchange that computing hides."""
    for row in result["rows"]:
        if row["what"] == "named":
            ours = Ours(row["hidden"], (row["lowest"], row["highest"]), result["rounds"])
            yield Row(f"links of {row['links']}", (NOT_GIVEN,), (f"{row['alone_ms']:.0f}",), None, ours, "emulated")


def spot(result: Any) -> Iterator[Row]:
    """Cost of policy ``spot`` over that of machines on demand alone, by trace."""
    costs: dict[str, list[float]] = {}
    for row in result["simulated"]:
        ours, dear = row["ways"]["spot and on demand (policy spot)"], row["ways"]["on demand alone"]
        costs.setdefault(row["trace"], []).append(ours["over_optimum"]["median"] / dear["over_optimum"]["median"])
    share = SPOT / ON_DEMAND
    for trace, shares in costs.items():
        ours = Ours(sorted(shares)[len(shares) // 2], (min(shares), max(shares)), len(shares))
        cells = (f"${ON_DEMAND:,}", f"${SPOT:,}", f"{share:.3f}")
        yield Row(trace, cells, (), about(share), ours, "simulated")


KUNGFU = Document(
    "KungFu (Mai et al., OSDI 2020)",
    "Can a training watch its gradients and change batch, workers, topology and synchronisation while it runs, "
    "nearly for nothing?",
    "Figures as the authors' repository prints them ([artifact](https://github.com/lsds/KungFu/blob/"
    "0022e05430f141d2f3316bfa680025f61aecb1d6/osdi20/README.md), [graphic](https://github.com/lsds/KungFu/blob/"
    "b1e176834138ead55afc58a25ff32a8614d4c4b8/benchmarks/system/result/sync-scalability.svg)): of one run each, "
    "without an interval. Where it shows a curve only, the direction is compared.",
    (
        Section(
            "Static small, static large and adaptive batch",
            "Another model on GPUs there; here a CNN of 21,286 parameters. Accuracy is measured, the seconds are "
            "modelled for 16 workers. The adaptive setting is the best on validation data.",
            "adaptive",
            "python -m benchmarks.adaptive.adaptive",
            "test accuracy, %",
            "95 %, over seeds",
            "seeds",
            ("accuracy",),
            ("modelled s",),
            lambda result: list(batches(result)),
            ("src/elastune/adapt", "benchmarks/adaptive"),
        ),
        Section(
            "The noise scale over a training, with the batch that it predicts",
            "The report draws the curve of a user's run; no result is committed.",
            "",
            "elastune run examples/digits.py --policy gns:max_batch=512 --out adaptive; elastune report adaptive",
        ),
        Section(
            "Section 6.2: another synchronisation strategy in a larger cluster",
            "Up to 32 K80 and ResNet-50 there; here 1 to 16 paced workers, links of 100 Mbit/s, and a CNN on "
            "Fashion-MNIST.",
            "switching",
            "python -m benchmarks.adaptive.switching",
            "samples/s over the fixed strategy's, whole run",
            "least to most of pairs of equal seed",
            "seeds",
            ("throughput",),
            ("samples/s of that one",),
            switched,
            ("src/elastune/parallel/sync", "src/elastune/adapt", "benchmarks/adaptive"),
        ),
        Section(
            "Figure 5: another topology where others' traffic slows a link",
            "Images/s of four K80 there; here exchanges of 8 MiB among four namespaces, one link slowed.",
            "topologies",
            "python -m benchmarks.parallel.topologies",
            "speed after the change over that before",
            "least to most of rounds",
            "rounds",
            ("img/s before", "slowed", "changed", "changed over slowed"),
            ("ms, changed",),
            lambda result: list(routed(result)),
            ("src/elastune/parallel/comm", "benchmarks/parallel"),
        ),
        Section(
            "Figure 6: workers are added as long as each is worth its place",
            "The policy is there and tested; its throughput was never measured.",
            "",
            "elastune run examples/mnist.py --workers 1:4 --policy provisioning",
        ),
        Section(
            "Figure 7: throughput over Horovod's",
            "ResNet-50 on 16 V100 and TCP there; here LeNet and an MLP on two CPU cores over gloo, beside DDP.",
            "overhead",
            "python -m benchmarks.parallel.overhead",
            "throughput over the other's",
            "quartiles of rounds",
            "rounds",
            ("KungFu, img/s", "Horovod, img/s", "ratio"),
            ("ms a step",),
            lambda result: list(scaled(result)),
            ("src/elastune/train", "src/elastune/parallel", "benchmarks/parallel"),
        ),
        Section(
            "Figure 8: what monitoring costs, a reading at every step",
            "ResNet-50, 64 images a K80 there (a far longer step); here LeNet on two CPU cores.",
            "monitoring",
            "python -m benchmarks.adaptive.monitoring",
            "step over that without a monitor",
            "quartiles of rounds",
            "rounds",
            ("img/s without", "img/s with", "cost"),
            ("ms a step",),
            lambda result: list(monitored(result)),
            ("src/elastune/adapt/monitors", "benchmarks/adaptive"),
            3,
        ),
        Section(
            "Figure 9: asynchronous collectives beside the ideal",
            "ResNet-50 and MobileNetV2 on 8 to 32 machines there; here computing is a rest, links are shaped.",
            "overlap",
            "python -m benchmarks.parallel.overlap",
            "share of the exchange that is hidden",
            "least to most of rounds",
            "rounds",
            ("share of the ideal",),
            ("ms alone",),
            lambda result: list(hidden(result)),
            ("src/elastune/train", "src/elastune/parallel", "benchmarks/parallel"),
            3,
        ),
        Section(
            "Slides: the cost of an epoch on spot machines",
            "Megatron-LM on 512 V100 there. Here offers are recorded, and a spot machine is assumed to cost .3 of "
            "one on demand: no smaller share is possible.",
            "spot",
            "python -m benchmarks.adaptive.spot --seconds 40 --windows 5",
            "cost over that on demand",
            "least to most of jobs",
            "jobs",
            ("on demand", "spot", "share"),
            (),
            lambda result: list(spot(result)),
            ("src/elastune/runtime", "src/elastune/tuning/simulate", "benchmarks/adaptive"),
        ),
    ),
)
