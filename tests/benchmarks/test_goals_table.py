"""The figures of the goals table, of the README and of what it says of peers: computed again from committed results.

Every number in the column "measured" must be one that the results give, to as many digits as it is written with, or one
of those that a row names here as no measurement (a number of workers, of models, of runs).
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ADAPTIVE = "gns 2 linear, cosine"
NO_RESULT = "no result committed"
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?|(?<![\w.])\.\d+")
Numbers = Sequence[float]


@cache
def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table() -> list[list[str]]:
    """The cells of each row of the goals table, in order."""
    text = (ROOT / "benchmarks" / "README.md").read_text().split("## Goals")[1].split("## How to run")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def unfounded(text: str, found: Numbers) -> list[str]:
    """The numbers in ``text`` that are none of ``found``, rounded as they are written."""
    missing = []
    for written in NUMBER.findall(text):
        digits = len(written.partition(".")[2])
        # A half is written up or down; a thousandth of its last digit is no other figure.
        near = 0.5001 * 10**-digits
        if not any(abs(abs(value) - float(written.replace(",", ""))) <= near for value in found):
            missing.append(written)
    return missing


def programs(*names: str) -> Numbers:
    medians = {c["program"]: c["fast_over_plain"]["median"] for c in result("overhead_programs")["cells"]}
    return [medians[name] for name in names]


def pauses(size: str, *events: str) -> Numbers:
    (cell,) = (c for c in result("elastic")["cells"] if c.get("size") == size and c["workers"] == 2)
    return [cell["events"][event]["pause_ms"]["median"] for event in events]


def reshapes(parameters: str) -> Numbers:
    rows = [row for row in result("reshape")["reshapes"] if row["parameters"] == parameters and row["s_per_100_mb"]]
    return [statistics.median(row["s_per_100_mb"] for row in rows if row["workers"] == workers) for workers in (4, 8)]


def mechanism(model: str, workers: int, variant: str, over: str, name: str = "mechanisms") -> float:
    (cell,) = (c for c in result(name)["cells"] if (c["model"], c["workers"]) == (model, workers))
    return float(cell["variants"][variant][over]["median"])


def small_models(variant: str, over: str) -> float:
    cells = [c for c in result("mechanisms")["cells"] if c["model"].endswith("_10m")]
    return max(cell["variants"][variant][over]["median"] for cell in cells)


def fed(kind: str) -> Numbers:
    """Samples a second over the plain loop's of each cell, ``fast`` and ``exact``; and the numbers of workers."""
    cells = [c for c in result("feeding")["cells"] if c["kind"] == kind]
    return [*(c[f"{mode}_over_plain_by_time"]["median"] for c in cells for mode in ("fast", "exact")), 1, 2, 4]


def state() -> Numbers:
    return [max(v["state_over_even"] for v in result("mechanisms_state")["cells"][0]["variants"].values())]


def monitors(*names: str) -> Numbers:
    """The least and the most median of these, at every tenth step."""
    cells = [c for c in result("monitoring")["cells"] if c["monitor"] in names]
    medians = [c["every_10_over_off_cpu"]["median"] for c in cells]
    return [min(medians), max(medians)]


def behind(other: str) -> Numbers:
    rows = result("sampler_ten")["judged_at_50"]["against"][other]["by_instance"].values()
    return [row["gain"] for row in rows if row["gain"] < -0.01]


def stopping(name: str) -> Numbers:
    medians = result(name)["judged_at_50"]["medians"]
    return [medians[instance] for instance in ("167152", "167185", "189873")]


def ten_stopped() -> Numbers:
    outcome = result("multi_fidelity_ten")["judged_at_50"]["against"]["auto none"]
    gains = [row["gain"] for row in outcome["by_instance"].values()]
    return [sum(gain > 0 for gain in gains), outcome["mean_gain"], *(gain for gain in gains if gain < 0)]


def doubling() -> Numbers:
    outcome = result("elastic_search_short_first")["times_ours"]["short_first"]["double"]
    return [outcome[level]["times_its_seconds"]["median"] for level in ("0.8", "0.9", "0.95", "0.98")]


def steepest(arm: str) -> Numbers:
    return [result("elastic_search")["all_cases_times_the_brokers_seconds"][arm]["median"]]


def spot() -> Numbers:
    ours = [row["ways"]["spot and on demand (policy spot)"] for row in result("spot")["simulated"]]
    assert all(way["in_time"] == way["of"] for way in ours), "every deadline"
    return [max(w["over_optimum"]["most"] for w in ours), min(w["goodput"]["least"] for w in ours)]


def adapted(data: str, against: str, adaptive: str) -> Any:
    verdicts = result("adaptive")["results"][data]["16 workers"]["verdicts"]
    (outcome,) = (v for v in verdicts if (v["against"], v["adaptive"]) == (against, adaptive))
    return outcome


def setting(data: str, name: str) -> Any:
    (outcome,) = (row for row in result("adaptive")["results"][data]["16 workers"]["rows"] if row["name"] == name)
    return outcome


def over_as_good() -> float:
    """Time of the adaptive setting over that of the fastest fixed one within whose interval it is."""
    ours = setting("fashion_mnist", ADAPTIVE)
    rows = result("adaptive")["results"]["fashion_mnist"]["16 workers"]["rows"]
    fixed = [r for r in rows if not r["adaptive"] and not r["failed"] and r["test"] - r["test_ci"] <= ours["test"]]
    as_good = [row for row in fixed if abs(row["test"] - ours["test"]) <= 0.01 and row["decay"] == "cosine"]
    return float(ours["seconds"] / min(row["seconds"] for row in as_good))


def goodput() -> Iterator[float]:
    """Per cent that all-reduce and the quorum have at the faults where all-reduce has least."""
    for name in ("goodput", "goodput_most_freezes"):
        rows = result(name)["compared"]
        least = min((row for row in rows if row["strategy"] == "allreduce"), key=lambda r: r["goodput"]["median"])
        quorum = (r for r in rows if "quorum" in r["strategy"] and r["faults"] == least["faults"])
        yield from (100 * row["goodput"]["median"] for row in (least, *quorum))


def switched(story: str, policy: str) -> Numbers:
    outcome = result("switching")[story][policy]
    return [100 * max(outcome["behind_best_fixed"]), outcome["whole_over_best_fixed"]]


def accuracy_behind() -> Numbers:
    """Points that ``sync_by_size`` is below the most accurate fixed strategy."""
    size = result("switching")["size"]
    ours = size["sync_by_size"]["accuracy"]
    return [100 * (max(row["accuracy"] for name, row in size.items() if name != "sync_by_size") - ours)]


def below_intervals() -> Numbers:
    """Points that ``sync_by_link`` is below the intervals of those that are more accurate."""
    link = result("switching")["link"]
    ours = link["sync_by_link"]
    others = [link[name] for name in ours["more_accurate"]]
    return [100 * (row["accuracy"] - row["accuracy_ci"] - ours["accuracy"]) for row in others]


def topology() -> Numbers:
    rows = result("topologies")["rows"]
    return [r["ratio"] for r in rows if (r["links"], r["mode"], r["topology"]) == ("one slow", "fast", "auto")]


def ensembles(place: int) -> Numbers:
    said = " ".join(task["goals"][place]["measured"] for task in result("ensembles")["results"].values())
    return [float(number.replace(",", "")) for number in NUMBER.findall(said)]


def strategies() -> Numbers:
    """Fewer bytes and points of accuracy of rounded DiLoCo, on each task."""
    said = [goal for goal in result("strategies")["goals"] if ", diloco:" in goal and "send=int4" in goal]
    return [float(x) for goal in said for x in re.findall(r"-?\d+\.\d+(?= x fewer bytes| ±)", goal)]


def sooner() -> Numbers:
    results = [
        row["shorter"]
        for row in result("strategies")["times"]
        if row["link"] == "50mbit" and row["learners"] == 8 and row["strategy"] == "diloco_rounded"
    ]
    whole = result("strategies")["whole"]
    tasks = {name.split()[0] for name in whole}
    return [*results, *(whole[f"{t} allreduce"]["seconds"] / whole[f"{t} diloco_rounded"]["seconds"] for t in tasks)]


hosts, agents = "hosts", "agents"
FIGURES: list[Callable[[], Numbers]] = [
    lambda: programs("gan", "in_turn", "accelerate", "trainer"),
    lambda: programs("averaged", "compiled"),
    lambda: [*pauses("small", "grow", "shrink", "kill", "kill_rank_0"), 0, 9],
    lambda: [*pauses("large", "grow", "shrink", "kill", "kill_rank_0"), 9],
    lambda: [c["over_ddp"]["median"] for c in result("elastic")["cells"] if c["who"] == "overhead"],
    lambda: [result(hosts)["goals"][name]["median_ms"] for name in ("join", "join_cold")],
    lambda: [result(hosts)["goals"]["lost"]["median_ms"]],
    lambda: [result(hosts)["goals"]["adopted_ms"]["median_ms"]],
    lambda: [ratio for peer in result(hosts)["over_elastune"].values() for ratio in peer.values()],
    lambda: [result(agents)["goals"]["agents_joined_s"]["measured"]],
    lambda: [result(agents)["goals"]["death_told_s"]["measured"]],
    lambda: [100 * result(agents)["goals"]["heartbeats_cpu"]["measured"]],
    lambda: [*reshapes("1M"), 1, 4, 8],
    lambda: [*reshapes("10M"), 10, 4, 8],
    lambda: [*reshapes("100M"), 100, 4, 8],
    lambda: [result("reshape_killed")["loopback"]["pause_of_wire"]],
    lambda: [result("reshape_killed")["hosts"]["pause_of_wire"]],
    lambda: [100, 1, *(row["elastune"]["of_a_copy"] for row in result("checkpoint_stall")["states"])],
    lambda: [
        mechanism("gpt_10m", 4, "zero", "over_replicated"),
        mechanism("gpt_10m", 4, "zero", "over_replicated", "mechanisms_zero"),
        4,
    ],
    lambda: [
        mechanism("mlp_10m", 2, "zero_two_copies", "over_zero"),
        mechanism("mlp_10m", 2, "zero_two_copies", "over_zero", "mechanisms_zero"),
        2,
    ],
    lambda: [small_models("sharded", "over_fsdp2"), small_models("sharded_two_copies", "over_sharded")],
    state,
    list,
    lambda: fed("tars"),
    lambda: fed("decoded"),
    lambda: [c["first_batch_s"] for c in result("feeding")["cells"] if c.get("stream") == "Seekable"],
    lambda: [
        *monitors("noise_scale", "performance", "loss"),
        *monitors("noise_scale_adam"),
        *monitors("curvature"),
    ],
    lambda: [*behind("optuna-gp"), *behind("optuna-tpe"), *behind("random")],
    lambda: [result("sampler_ten")["judged_at_50"]["against"][o]["mean_gain"] for o in ("optuna-gp", "optuna-tpe")],
    lambda: [*stopping("multi_fidelity"), *stopping("multi_fidelity_ten"), 5],
    list,
    ten_stopped,
    doubling,
    list,
    lambda: steepest("one GPU each"),
    lambda: steepest("static"),
    lambda: steepest("double"),
    spot,
    lambda: [adapted(data, "constant rate", "gns sqrt")["time_ratio"] for data in ("fashion_mnist", "mnist")],
    lambda: [
        adapted("fashion_mnist", "constant rate or cosine decay", ADAPTIVE)["time_ratio"],
        over_as_good(),
        0.6,
    ],
    lambda: [
        100 * adapted("mnist", "constant rate or cosine decay", ADAPTIVE)["difference"],
        100 * setting("mnist", "fixed 32, cosine")["test_ci"],
    ],
    lambda: [*strategies(), 8],
    sooner,
    lambda: [*switched("size", "sync_by_size"), *accuracy_behind()],
    lambda: [*switched("link", "sync_by_link"), *below_intervals()],
    lambda: list(goodput()),
    topology,
    lambda: [result("topologies")["turns_slow"]["steps_until_answered"]],
    lambda: ensembles(0),
    lambda: ensembles(1),
    lambda: ensembles(2),
]


def test_a_number_is_compared_as_it_is_written() -> None:
    assert unfounded("at most 1.06; .97 and 1,312 on 4 workers", [1.0619, 0.9712, 1311.9]) == ["4"]
    assert unfounded("1.06", [1.0651]) == ["1.06"]
    assert unfounded("-0.17 or 0.17", [-0.17]) == []


def test_every_row_has_its_figures() -> None:
    assert len(table()) == len(FIGURES)


def test_readme_what_slots_cost() -> None:
    text = between("Compared with the CPU time of plain PyTorch", "`benchmarks/parallel/slots.py`")
    results = {
        slots: [cell["over_plain"][f"exact_{slots}"]["median"] for cell in result("slots")["cells"]]
        for slots in (2, 4, 8)
    }
    (most_2,) = re.findall(r"2 slots up to ([\d.]+) times", text)
    (range_4,) = re.findall(r"took ([\d.]+ to [\d.]+) times as much", text)
    (range_8,) = re.findall(r"8 slots ([\d.]+ to [\d.]+) times", text)
    assert unfounded(most_2, [max(results[2])]) == []
    assert unfounded(range_4, [min(results[4]), max(results[4])]) == []
    assert unfounded(range_8, [min(results[8]), max(results[8])]) == []


def peer_pauses(event: str) -> dict[str, float]:
    """Medians in ms, by the system and, where it has several, the name of its time limits."""
    cells = result("elastic_peers")["cells"]
    return {
        " ".join(filter(None, (cell["who"], cell.get("timeouts", {}).get("name")))): pause["median"]
        for cell in cells
        if (pause := cell.get("events", {}).get(event, {}).get("pause_ms"))
    }


def test_readme_what_a_killed_worker_costs_the_others() -> None:
    text = between("a killed worker", "([medians of few]")
    killed = peer_pauses("kill")
    ours = killed["elastune"]
    beside = [killed["torchft tuned"] / 1e3, killed["torchft defaults"] / 1e3, killed["torchrun"] / 1e3]
    first, second = text.split("Another machine")
    assert unfounded(first, [ours, *beside, killed["torchft tuned"] / ours, 0.50 / 0.070]) == []
    assert NO_RESULT in second, "of the other machine nothing is committed"
    joins = peer_pauses("grow")
    assert joins["torchft tuned"] == pytest.approx(joins["elastune"], rel=0.1), "joining is as short in torchft"


def between(begin: str, end: str) -> str:
    """What the README says from ``begin`` to ``end``, on one line."""
    text = " ".join((ROOT / "README.md").read_text().split())
    assert begin in text
    return text[text.index(begin) :].split(end)[0]


@pytest.mark.parametrize("place", range(len(FIGURES)))
def test_what_is_measured_is_in_a_result(place: int) -> None:
    *_, goal, measured, _ = table()[place]
    missing = [] if NO_RESULT in measured else unfounded(measured, FIGURES[place]())
    assert not missing, f"{goal}: {measured}"
