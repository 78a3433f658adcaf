"""Does it pay to begin with what was learnt elsewhere, from coarse to fine, or by sub-problems?

**Beginning elsewhere** (``--start-from``): MNIST, then Fashion-MNIST; and five classes of Fashion-MNIST, drawn by the
seed, then the other five. A source of 5,000 images and 3 epochs; 1,000 images of the target, 12 epochs, with the
source's trunk or with initial values, all else equal. The target accuracy is what the cold start has after its last
epoch, by a validation set; it counts after which epoch that is first reached. Test accuracy is told beside.

**From coarse to fine, and sub-problems**, of Fashion-MNIST by 4,000 images, beside a flat model of EQUAL compute:

- *given tree*, *learnt tree*: a gate for 3 groups of classes, then one part a group from the gate's weights, joined by
  ``elastune.join``. The learnt tree comes of what a flat model of one epoch confuses, whose training is counted.
- *deeper tree*: the same model's confusions cut into 2 groups and these into 5, ``elastune.train_tree``: each node from
  the weights of the one above, all for as many epochs as three levels leave, the root for what is left then.
- *regions*: two parts see one half of each image; *samples*: two parts see one half of the training images each;
  ``elastune.stacked_parts`` puts a head over them, trained by the quarter of the images that the parts have not seen.

Compute is counted in multiply-adds by the layers' shapes (three forward passes for a sample that is trained by, one
where parts are frozen), since seconds of a shared machine are no equal measure: what comes last (the groups' parts,
the head) trains for as many epochs as is left. Worker-seconds stand beside. A way "pays" where the 95 % interval of
its gain over flat lies above 0, "does not pay" where it lies below. Learning rate, batch and net are the same
everywhere, and none was tuned.

All of this was decided before a figure was seen but for the sizes: a first run of 5 seeds and 6 epochs of the flat
model had the trees at 0.93 to 0.95 of its compute (epochs are whole), and intervals too wide to tell of beginning
elsewhere. There accuracies of the last epochs were seen to go up and down, so epochs to 0.95 of the target are told,
too.

    python -m benchmarks.user.transfer          # 10 and 5 seeds of MNIST, Fashion-MNIST; writes results/transfer.json
    python -m benchmarks.user.transfer --smoke  # 1 seed, the digits in all roles, the fewest epochs; writes nothing
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.result_file import write_result
from benchmarks.programs.transfer_train import LOADERS, PARTS, build, splits, view
from benchmarks.programs.transfer_train import config as defaults
from benchmarks.programs.transfer_train import model_of as model_in_its_role
from benchmarks.user.transfer_summary import TRAINED, compared, epochs_to, multiplications, started
from torch import nn

import elastune
from elastune.core.journal.files import read
from elastune.core.journal.run_records import Reported
from elastune.core.run import ExecutionSettings, Program, RunSpec, StartFrom
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.checkpoints.checkpoint import load
from elastune.tuning.reuse.class_tree import ClassTree
from elastune.tuning.reuse.composed_models import model_of
from elastune.tuning.reuse.kept_models import library
from elastune.tuning.reuse.tree_training import learn_classes
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

HERE = Path(__file__).parents[1]
RESULT = HERE / "results" / "transfer.json"
PROGRAM = Program(HERE / "programs" / "transfer_train.py")
MEANS = ExecutionSettings(mode="fast", num_slots=1)
WORKERS = 2
FRESH = ("head.*",)
TREES = {"fashion": [[0, 2, 3, 4, 6], [5, 7, 9], [1, 8]], "digits": [[0, 6, 5], [1, 7, 4, 9], [2, 3, 8]]}
"""Given: tops, shoes, and what is neither; digits that look alike."""
DEEPER = (2, 5)  # groups of classes on each level
UNEQUAL = 0.05  # of compute
HEADS_SHARE = 4  # the head over parts is trained by one in so many of the images


@dataclass(frozen=True)
class Size:
    """``seeds`` of beginning elsewhere, ``flat_seeds`` of what is compared with a flat model."""

    source: str
    target: str
    seeds: int
    flat_seeds: int
    source_train: int
    source_epochs: int
    target_train: int
    target_epochs: int
    train: int
    selection: int
    epochs: int


FULL = Size("mnist", "fashion", 10, 5, 5000, 3, 1000, 12, 4000, 2000, 12)
SMOKE = Size("digits", "digits", 1, 1, 200, 1, 100, 2, 400, 100, 2)


@dataclass(frozen=True)
class Place:
    """Where trainings run, and into which folder they go."""

    cluster: LocalCluster
    folder: Path

    def run(self, name: str, config: dict[str, Any], begins: StartFrom | None = None) -> tuple[list[float], float]:
        """One training: validation accuracy by epoch, and test accuracy."""
        out = self.folder / name
        result = run_job(RunSpec(PROGRAM, out, config, execution=MEANS, start_from=begins), cluster=self.cluster)
        results = [e.record.metrics for e in read(out / "journal.jsonl") if isinstance(e.record, Reported)]
        return [one["accuracy"] for one in results if "accuracy" in one], result.metrics["test_accuracy"]

    def study(
        self, name: str, config: dict[str, Any], over: dict[str, list[int]], begins: StartFrom | None = None
    ) -> tuple[Path, float]:
        """One training for each of the values of a setting, in parallel: the study's folder, its worker-seconds."""
        (setting, values), out = next(iter(over.items())), self.folder / name
        config = {key: value for key, value in config.items() if key != setting}
        request = StudyRequest(
            PROGRAM, out, sampler="grid", trials=len(values), workers=WORKERS, execution=MEANS, config=config,
            keep="all", start_from=begins,
        )  # fmt: skip
        space = lambda trial: {setting: trial.suggest_categorical(setting, values)}  # noqa: E731
        tuned = tune(request, space=space, cluster=self.cluster)
        assert len(tuned.complete) == len(values), f"{out}: a training has failed"
        return out, sum(trial.worker_seconds for trial in tuned.complete)


def begun_elsewhere(pair: str, seed: int, size: Size, place: Place) -> dict[str, Any]:
    """One seed of one pair of tasks."""
    order = torch.randperm(10, generator=torch.Generator().manual_seed(seed)).tolist()
    mine, others = (sorted(order[:5]), sorted(order[5:])) if pair == "halves" else ([], [])
    source = {"data": size.target if others else size.source, "classes": mine, "epochs": size.source_epochs}
    target = {"data": size.target, "classes": others, "epochs": size.target_epochs, "train": size.target_train}
    common = {"seed": seed, "selection": size.selection}
    place.run(f"{pair}-source", {**common, **source, "train": size.source_train})
    cold, cold_test = place.run(f"{pair}-cold", {**common, **target})
    begins = StartFrom(place.folder / f"{pair}-source", fresh=FRESH)
    warm, warm_test = place.run(f"{pair}-warm", {**common, **target}, begins)
    return {
        "cold_epochs": epochs_to(cold, cold[-1]),
        "warm_epochs": epochs_to(warm, cold[-1]),
        "target_accuracy": cold[-1],
        "cold": cold,
        "warm": warm,
        "cold_test": cold_test,
        "warm_test": warm_test,
        "source_passes": size.source_train * size.source_epochs,
        "target_samples": size.target_train,
    }


@dataclass(frozen=True)
class Flat:
    """The flat model of a seed, and what it is compared by: images to test, its labels, one of its samples."""

    seed: int
    size: Size
    place: Place
    config: dict[str, Any]
    data: Any
    multiplications: int

    @property
    def compute(self) -> int:
        return self.size.train * self.size.epochs * self.multiplications * TRAINED

    def row(self, model: nn.Module, compute: float, seconds: float) -> dict[str, float]:
        """Of one way: what the test set says, and what it costs."""
        x, y = self.data.test.tensors
        with torch.no_grad():
            hits = torch.cat([model.eval()(part).argmax(1) for part in x.split(1000)]) == y
        inference = multiplications(model, x[:1])
        test = float(hits.double().mean())
        return {"test": test, "compute": compute, "inference": inference, "worker_seconds": seconds}


def flat_of(seed: int, size: Size, place: Place) -> Flat:
    shared = {"data": size.target, "seed": seed, "train": size.train, "selection": size.selection}
    config = {**defaults, **shared, "epochs": size.epochs}
    data = splits(config)
    return Flat(seed, size, place, config, data, multiplications(build(config), data.test.tensors[0][:1]))


def flat_row(flat: Flat) -> dict[str, float]:
    out, seconds = flat.place.study("flat", flat.config, {"part": [0]})
    return flat.row(model_of(library(out).candidates[0], build), flat.compute, seconds)


def by_tree(flat: Flat, name: str, tree: ClassTree, before: tuple[int, float], gate_epochs: int) -> dict[str, float]:
    """A gate, then a part a group from its weights. ``before``: multiply-adds and seconds that the tree has cost."""
    config, examples = {**flat.config, "tree": tree.to_json()}, flat.data.test.tensors[0][:1]
    gate_config = {**config, "epochs": gate_epochs}
    gate, gate_s = flat.place.study(f"{name}-gate", gate_config, {"group": [-1]})
    begins = StartFrom(library(gate).candidates[0].folder, fresh=FRESH)
    groups, labels = list(range(len(tree.groups))), flat.data.train.tensors[1]
    spent = before[0] + flat.size.train * gate_epochs * multiplications(build(gate_config), examples) * TRAINED
    sizes = [multiplications(build({**config, "group": group}), examples) for group in groups]
    per_epoch = sum(len(tree.rows(labels, group)) * size for group, size in zip(groups, sizes, strict=True)) * TRAINED
    epochs = max(1, round((flat.compute - spent) / per_epoch))
    parts, parts_s = flat.place.study(f"{name}-parts", {**config, "epochs": epochs}, {"group": groups}, begins)
    model = elastune.join(gate, parts, build, tree)
    return flat.row(model, spent + epochs * per_epoch, before[1] + gate_s + parts_s)


def by_deeper_tree(flat: Flat, tree: ClassTree, before: tuple[int, float]) -> dict[str, float]:
    """A model for each node, from the weights of the one above. ``before``: as of ``by_tree``."""
    config, examples = {**flat.config, "tree": tree.to_json()}, flat.data.test.tensors[0][:1]
    labels = flat.data.train.tensors[1]
    per_epoch = {
        node: len(tree.rows(labels, node)) * multiplications(build({**config, "node": node}), examples) * TRAINED
        for node in tree.nodes()
    }
    left, root = flat.compute - before[0], per_epoch[""]
    epochs = max(1, int(left / sum(per_epoch.values())))
    below = epochs * (sum(per_epoch.values()) - root)
    root_epochs = max(1, round((left - below) / root))
    settings = {name: value for name, value in config.items() if name not in ("tree", "node")}
    settings |= {"epochs": epochs, "root_epochs": root_epochs}
    result = elastune.train_tree(
        PROGRAM.path, tree, flat.place.folder / "deeper", fresh=FRESH, config=settings, workers=WORKERS,
        execution=MEANS, cluster=flat.place.cluster,
    )  # fmt: skip
    assert len(result.complete) == len(tree.nodes()), f"{result.out}: a training has failed"
    model = elastune.join(result, result, build, tree)
    seconds = before[1] + sum(trial.worker_seconds for trial in result.complete)
    return flat.row(model, before[0] + below + root_epochs * root, seconds)


def by_parts(flat: Flat, split: str) -> dict[str, float]:
    """Two parts in parallel, and a head over them by the images that they have not seen, for what compute is left."""
    kept = flat.size.train // HEADS_SHARE
    own = (flat.size.train - kept) // (PARTS if split == "samples" else 1)
    config = {**flat.config, "split": split, "train": own}
    parts, parts_s = flat.place.study(split, config, {"part": list(range(PARTS))})
    example = flat.data.test.tensors[0][:1]
    one = multiplications(build(config), view(config, example))
    spent = PARTS * own * flat.size.epochs * one * TRAINED
    whole = elastune.stacked_parts(parts, build, outputs=10, example=example, view=view)
    per_epoch = kept * (multiplications(whole, example) + (TRAINED - 1) * whole.head.weight.numel())
    epochs = max(1, round((flat.compute - spent) / per_epoch))
    head = {**flat.config, "stack": str(parts), "first": flat.size.train - kept, "train": kept, "epochs": epochs}
    out, head_s = flat.place.study(f"{split}-head", head, {"part": [0]})
    trained = library(out).candidates[0]
    model = model_in_its_role(dict(trained.config), example)
    model.load_state_dict(dict(load(trained.checkpoint, "train again").states["model"]))
    return flat.row(model, spent + epochs * per_epoch, parts_s + head_s)


def beside_flat(seed: int, size: Size, place: Place) -> tuple[dict[str, dict[str, float]], list[list[int]]]:
    """One seed of all ways, and the tree that was learnt."""
    flat = flat_of(seed, size, place)
    results = {"flat": flat_row(flat)}
    half = max(1, size.epochs // 2)
    results["given tree"] = by_tree(flat, "given", elastune.class_tree(TREES[size.target]), (0, 0.0), half)
    short, short_s = place.study("short", {**flat.config, "epochs": 1}, {"part": [0]})
    tree = learn_classes(short, 3).tree
    before = flat.size.train * flat.multiplications * TRAINED, short_s
    results["learnt tree"] = by_tree(flat, "learnt", tree, before, max(1, half - 1))
    results["deeper tree"] = by_deeper_tree(flat, learn_classes(short, DEEPER).tree, before)
    for split in ("regions", "samples"):
        results[split] = by_parts(flat, split)
    return results, tree.to_json()


@dataclass(frozen=True)
class Found:
    """What was measured so far, by seed."""

    size: Size
    elsewhere: dict[str, list[dict[str, Any]]]
    ways: list[dict[str, dict[str, float]]]
    trees: list[list[list[int]]]
    loads: list[float]

    @property
    def pairs(self) -> dict[str, Any]:
        size = self.size
        names = {"tasks": f"{size.source}, then {size.target}"}
        names["halves"] = f"half the classes of {size.target}, then the other half"
        return {names[pair]: started(result, size.target_epochs) for pair, result in self.elsewhere.items()}

    @property
    def beside(self) -> dict[str, Any]:
        return compared(self.ways)

    def to_json(self) -> dict[str, Any]:
        figures = {"begun_elsewhere": self.pairs, "beside_flat": self.beside}
        each = {"seeds_beside_flat": self.ways, "learnt_trees": self.trees}
        return {"loads": self.loads, "size": vars(self.size), **figures, **each}


def told(pairs: dict[str, Any], ways: dict[str, Any]) -> list[str]:
    """The figures as lines of text."""
    lines = []
    for pair, one in pairs.items():
        parts = [f"epochs to target cold {one['cold_epochs']}, begun with the source {one['warm_epochs']}"]
        for name in ("epochs_saved", "epochs_saved_near_target", "after_one_epoch_points", "test_points"):
            parts.append(f"{name.replace('_', ' ')} {words(one[name])}")
        counted = one["sample_passes_saved_with_the_source_counted"]
        lines.append(f"{pair}: {'; '.join(parts)}; with the source's training counted it {counted['verdict']}")
    for name, one in ways.items():
        costs = f"compute {one['compute_over_flat']:.2f}x, inference {one['inference_over_flat']:.2f}x"
        gain = "" if name == "flat" else f", over flat {words(one['points_over_flat'])} points"
        lines.append(f"{name:12} {one['test_percent']:.2f} %{gain} ({costs}, {one['worker_seconds']:.1f} worker-s)")
    return lines


def words(gain: dict[str, Any]) -> str:
    half = "" if gain["ci95_half"] is None else f" ± {gain['ci95_half']:g}"
    return f"{gain['mean']:+g}{half} ({gain['verdict']})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one seed on the digits; writes nothing")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = SMOKE if options.smoke else FULL
    for data in {size.source, size.target}:
        LOADERS[data]()  # what is missing is told before anything is trained
    result = Found(size, {"tasks": [], "halves": []}, [], [], [round(os.getloadavg()[0], 1)])
    with tempfile.TemporaryDirectory(prefix="transfer-") as name, LocalCluster(WORKERS) as cluster:
        for seed in range(size.seeds):
            place = Place(cluster, Path(name) / str(seed))
            for pair, column in result.elsewhere.items():
                column.append(begun_elsewhere(pair, seed, size, place))
            if seed < size.flat_seeds:
                ways, tree = beside_flat(seed, size, place)
                result.ways.append(ways)
                result.trees.append(tree)
                tests = ", ".join(f"{way} {100 * one['test']:.2f}" for way, one in ways.items())
                print(f"seed {seed}: {tests}", flush=True)
            result.loads.append(round(os.getloadavg()[0], 1))
            if not options.smoke:  # each time: who stops it here has what was measured so far
                write_result(options.out, result.to_json())
    print("\n".join(told(result.pairs, result.beside)))
    unequal = [name for name, one in result.beside.items() if abs(one["compute_over_flat"] - 1) > UNEQUAL]
    if unequal and not options.smoke:
        print(f"compute is not equal: {unequal}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
