"""Which page tells more of an error: by the room, or the file, that it comes from."""

from __future__ import annotations

PROGRAMS, PROGRAM = "docs/programs.md", "README.md#your-program"
EDITS = f"{PROGRAMS}#edits-and-other-data"

# A name stands for all that is in it; of several the longest counts.
PAGES = {
    # the program and its session
    "train": PROGRAMS,
    "train.adapt": "docs/policies.md",
    "train.checkpoints": f"{PROGRAMS}#state-files-an-end-of-the-programs-own",
    "train.checkpoints.dcp": "docs/after-the-search.md#taking-it-elsewhere",
    "train.checkpoints.export": "docs/after-the-search.md#taking-it-elsewhere",
    "train.checkpoints.inherit": "docs/studies.md#which-trials-go-on---stopping",
    "train.checkpoints.run_state": PROGRAMS,
    "train.checkpoints.start_from": "docs/transfer.md",
    "train.collectives": "docs/collectives.md",
    "train.compiling": f"{PROGRAMS}#compiled-models",
    "train.data": f"{PROGRAMS}#data",
    "train.data.planned": "docs/sync.md",
    "train.data.seen": EDITS,
    "train.data.stream": f"{PROGRAMS}#streams",
    "train.data.tars": f"{PROGRAMS}#streams",
    "train.device": "docs/gpu.md",
    "train.examine": f"{PROGRAMS}#what-elastune-check-finds",
    "train.freezing": f"{PROGRAMS}#frozen-for-a-while",
    "train.predictions": "docs/ensembles.md#what-a-program-does-for-it",
    "train.program": PROGRAM,
    "train.program.source": EDITS,
    "train.rehearsal": "docs/meshes.md#which-mechanism-searched",
    "train.scaling": f"{PROGRAMS}#mixed-precision-of-the-programs-own",
    "train.session_assets": "docs/ensembles.md#what-a-program-does-for-it",
    "train.session_collectives": "docs/collectives.md",
    "train.session_state": f"{PROGRAMS}#state-files-an-end-of-the-programs-own",
    "train.several": f"{PROGRAMS}#several-models-and-optimizers",
    "train.step_facts": f"{PROGRAMS}#what-elastune-check-finds",
    "train.tracked": f"{PROGRAMS}#state-files-an-end-of-the-programs-own",
    "train.transaction": f"{PROGRAMS}#several-losses-of-a-batch",
    "train.unfreezing": f"{PROGRAMS}#frozen-for-a-while",
    "adapters": f"{PROGRAMS}#scripts-written-for-accelerate",
    "adapters.fabric": f"{PROGRAMS}#scripts-written-for-lightnings-fabric",
    "adapters.fabric_steps": f"{PROGRAMS}#scripts-written-for-lightnings-fabric",
    "adapters.lightning": f"{PROGRAMS}#lightnings-trainer",
    "adapters.lightning_parts": f"{PROGRAMS}#lightnings-trainer",
    "adapters.transformers": f"{PROGRAMS}#hugging-faces-trainer",
    "adapters.trainer_parts": f"{PROGRAMS}#hugging-faces-trainer",
    "cli.from_plain": PROGRAMS,
    "job.changes": EDITS,
    "job.portability": f"{PROGRAMS}#what-elastune-check-finds",
    "job.resumption": f"{PROGRAMS}#going-on-with-a-run",
    # workers, and how they come together
    "core.compression": "docs/compression.md",
    "core.mesh": "docs/meshes.md",
    "core.mesh_choice": "docs/meshes.md#which-mesh-how-far-does-it-scale",
    "core.routes": "docs/topologies.md",
    "core.start_from": "docs/transfer.md",
    "core.sync_check": "docs/sync.md",
    "core.sync_choice": "docs/sync.md",
    "core.sync_plan": "docs/sync.md",
    "core.sync_schedule": "docs/sync.md#another-strategy-while-training-goes-on",
    "core.topology": "docs/topologies.md",
    "comm.compress": "docs/compression.md",
    "mechanisms": "docs/meshes.md",
    "mechanisms.deepspeed": "docs/meshes.md#mechanisms-of-other-packages",
    "mechanisms.fairscale": "docs/meshes.md#mechanisms-of-other-packages",
    "mechanisms.horovod": "docs/meshes.md#mechanisms-of-other-packages",
    "mechanisms.pipeline": "docs/meshes.md#stages",
    "mechanisms.tensor": "docs/meshes.md#tensor-layers-divided",
    "monitors": "docs/policies.md",
    "policies": "docs/policies.md",
    "sync": "docs/sync.md",
    # clusters and what they cost
    "cli.clusters": "docs/clusters.md",
    "cli.market": "docs/spot.md",
    "cluster": "docs/clusters.md",
    "cluster.deploy": "docs/clusters.md#kubernetes-and-skypilot",
    "cluster.kinds.ray": "docs/clusters.md#ray",
    "cluster.kinds.slurm": "docs/clusters.md#slurm",
    "cluster.ray": "docs/clusters.md#ray",
    "cluster.slurm": "docs/clusters.md#slurm",
    "cluster.trace_files": "docs/spot.md#files",
    "cluster.transfer": "docs/clusters.md#without-a-shared-folder",
    "job.spot": "docs/spot.md",
    "journal.money": "docs/spot.md",
    "plan.traces": "docs/spot.md#files",
    # searches and what comes after them
    "frontier": "docs/planning.md",
    "plan.steps": "docs/planning.md",
    "reuse": "docs/ensembles.md",
    "reuse.class_tree": "docs/transfer.md#from-coarse-to-fine-groups-of-classes",
    "reuse.composed": "docs/transfer.md#sub-problems-under-one-head",
    "reuse.composed_file": "docs/transfer.md#sub-problems-under-one-head",
    "reuse.learn_classes": "docs/transfer.md#from-coarse-to-fine-groups-of-classes",
    "reuse.logme": "docs/transfer.md#which-source",
    "reuse.soup": "docs/ensembles.md#soups-one-models-inference",
    "reuse.soup_study": "docs/ensembles.md#soups-one-models-inference",
    "reuse.task": "docs/transfer.md#which-source",
    "reuse.transfer": "docs/transfer.md",
    "reuse.tree_study": "docs/transfer.md#from-coarse-to-fine-groups-of-classes",
    "search": "docs/studies.md",
    "search.analysis.warm_start": "docs/studies.md#earlier-studies---warm-start-dir",
    "search.space": "docs/spaces.md",
    "search.stopping": "docs/studies.md#which-trials-go-on---stopping",
    "simulate": "docs/simulate.md",
    "study": "docs/studies.md",
    "study.changes": EDITS,
}


def page_of(module: str) -> str:
    """The page, and a heading of it, for what ``module`` ("elastune.train.data.asked") raises; "" without one."""
    package, _, name = module.partition(".")
    while package == "elastune" and name:
        if name in PAGES:
            return PAGES[name]
        name = name.rpartition(".")[0]
    return ""
