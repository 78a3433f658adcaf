"""The options that commands share: name, type and help text of each, written once."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from elastune.tuning.study.request import StudyRequest

NAMED = "NAME[:OPTION=VALUE,...]"
HELP = {
    option_field.name: option_field.metadata["help"]
    for option_field in fields(StudyRequest)
    if "help" in option_field.metadata
}
"""The help text of each field of a study's request."""
File = Annotated[Path, typer.Argument(help="The program: a Python file that defines train(session).")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGUMENT", help="Arguments of the program's own, which it finds in sys.argv."),
]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER|URL",
        help="Folder for the journal, logs and report, or a URL that fsspec can open, such as s3://bucket/run. "
        "[default: the next free elastune-out/NAME-COMMAND-N]",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help=HELP["resume"])]
AcrossChanges = Annotated[
    bool,
    typer.Option(
        "--across-changes",
        help="Of a study: compare trials that began before an accepted change of the program, its space or the data "
        "with those after it.",
    ),
]
AcceptChanges = Annotated[bool, typer.Option("--accept-changes", help=HELP["accept_changes"])]
Unchecked = Annotated[
    bool,
    typer.Option(
        "--unchecked",
        help="Do not prove in the first step that several slots train as one pass a batch: that the loss is a mean, "
        "with the same gradient on all workers.",
    ),
]
FromDcp = Annotated[
    Path | None,
    typer.Option(
        "--from-dcp",
        metavar="DIR",
        help="Begin with the weights in this checkpoint folder of torch.distributed.checkpoint, and with what it has "
        "of the optimizer's tensors.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and everything else on stderr.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check all that can be checked without a worker, print what would be started, and end. No results are "
        "written.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Override a value of the program's config, such as lr=0.01, or optim.lr=0.01 of a nested one. May be "
        "repeated.",
    ),
]
Data = Annotated[Path | None, typer.Option(help="Folder of the data sets, instead of $ELASTUNE_DATA.")]
Epochs = Annotated[int | None, typer.Option(help=HELP["epochs"])]
Seed = Annotated[int, typer.Option(help=HELP["seed"])]
Divergence = Annotated[str, typer.Option(metavar="FACTOR|off", help=HELP["divergence"])]
Mode = Annotated[
    str,
    typer.Option(
        help="exact: the same weights for any number of workers; fast: weights that are equal within rounding."
    ),
]
Slots = Annotated[
    int | None,
    typer.Option(
        help="Number of equal shares that each global batch is cut into. It shows in the result. No run has more "
        "workers than slots. [default: as many as the command allows workers, so 1 where it names none]"
    ),
]
MicroBatch = Annotated[int | None, typer.Option(help="Most samples in one forward pass. [default: no limit]")]
BucketBytes = Annotated[
    int | None,
    typer.Option(
        help="Most bytes of gradients in one message between replicated workers. [default: 16 MiB, the first 1 MiB]"
    ),
]
Precision = Annotated[str, typer.Option(help="fp32, or bf16 (autocast in the forward pass).")]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="AXIS=N,...",
        help="Arrange the workers of a training as a grid, which also sets their number: data=2,tensor=2 has 4. Axes: "
        "data, shard, tensor, pipeline. See docs/meshes.md.",
    ),
]
Mechanism = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[+NAME...]",
        help="How a copy of the model lies on workers: replicated, zero or sharded. Join it with tensor or pipeline "
        "to divide the layers, too, such as pipeline+zero. Or a package does it all: fsdp2, deepspeed, fairscale, "
        "horovod. See docs/meshes.md. "
        "[default: the least that --mesh needs]",
    ),
]
Topology = Annotated[
    str,
    typer.Option(
        metavar="NAME|parents=[...]",
        help="Routes by which sums travel between workers: auto, native, ring, tree, binary_tree, star, hierarchical, "
        "or parents=[0,0,1,0] with the parent of each rank. :chunk_kib=N at the end sets the size of the chunks that "
        "are sent, in KiB. See docs/topologies.md.",
    ),
]
Copies = Annotated[
    int | None,
    typer.Option(
        help="How many workers hold each part of divided state. [default: 2 where workers may change, else 1]"
    ),
]
VirtualTensor = Annotated[
    int | None,
    typer.Option(
        help="Number of blocks that mechanism tensor divides a layer into, whatever the mesh. It shows in the result. "
        "[default: 4, or as many as workers]"
    ),
]
Schedule = Annotated[
    str, typer.Option(help="Order of passes in mechanism pipeline: 1f1b, gpipe, interleaved or zero-bubble.")
]
ZeroStage = Annotated[
    int | None,
    typer.Option(
        help="What mechanism deepspeed or fairscale divides: 0 nothing, 1 optimizer state, 2 also gradients, 3 also "
        "parameters. fairscale has stage 2 alone. [default: 2]"
    ),
]
Offload = Annotated[
    bool, typer.Option("--offload", help="Keep optimizer state in the CPU's memory. Needs --mechanism zero or sharded.")
]
Compress = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="Compress gradients before they are sent: bf16, fp16, int8, powersgd:rank=4 or topk:ratio=0.01. Needs "
        "--mode fast, and shows in the result. See docs/compression.md.",
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads of each worker.")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:N.")]
Budget = Annotated[str | None, typer.Option(metavar="TIME", help=HELP["budget_s"] + ", such as 90s, 3m or 1.5h.")]
FrontierBudget = Annotated[
    str | None,
    typer.Option(
        metavar="TIME|auto", help="Wall time for all phases, such as 90s, 3m or 1.5h; auto: as long as they need."
    ),
]
Objectives = Annotated[
    list[str] | None,
    typer.Option(
        "--objective",
        metavar="NAME:max|min",
        help="A metric to optimise, such as accuracy:max, instead of the program's objectives. May be repeated.",
    ),
]
Constraints = Annotated[
    list[str] | None,
    typer.Option("--constraint", metavar="TEXT", help=HELP["constraints"] + " May be repeated."),
]
Sampler = Annotated[str, typer.Option(help=HELP["sampler"])]
Stopping = Annotated[str, typer.Option(metavar=NAMED, help=HELP["stopping"])]
Keep = Annotated[str, typer.Option(metavar="RULE", help=HELP["keep"])]
KeepSize = Annotated[str | None, typer.Option(metavar="SIZE", help=HELP["keep_bytes"] + ", such as 500MB or 2GB.")]
WarmStart = Annotated[list[Path] | None, typer.Option(help=HELP["warm_start"] + " May be repeated.")]
TrialWorkers = Annotated[str | None, typer.Option(metavar="LOW:HIGH", help=HELP["trial_workers"])]
Allocation = Annotated[str, typer.Option(metavar=NAMED, help=HELP["allocation"])]
Trials = Annotated[
    int | None,
    typer.Option(help=HELP["trials"] + " A study needs --trials, --budget, --worker-hours or --patience."),
]
TrialTimeout = Annotated[str | None, typer.Option(metavar="TIME", help=HELP["trial_timeout_s"] + ": 30m.")]
PlanFolder = Annotated[Path | None, typer.Option("--plan", metavar="FOLDER", help=HELP["plan"])]
StudyWorkers = Annotated[int, typer.Option("--workers", help=HELP["workers"])]
WorkerHours = Annotated[float | None, typer.Option(help=HELP["worker_hours"])]
Until = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help=HELP["until"] + " May be repeated: one trial must then reach all of them."),
]
Target = Annotated[str | None, typer.Option(metavar="TEXT", help=HELP["target"])]
Patience = Annotated[int | None, typer.Option(help=HELP["patience"])]
Prices = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="CSV file of what a worker-hour costs on each kind of host, with the columns kind,price or "
        "time,kind,price. See docs/spot.md.",
    ),
]
HostKind = Annotated[
    str,
    typer.Option(
        "--kind",
        help="With --prices: the kind, such as spot, of hosts that do not tell theirs. This machine is one of these.",
    ),
]
Price = Annotated[float, typer.Option(help=HELP["price_per_worker_hour"])]
Workers = Annotated[
    str | None,
    typer.Option(
        metavar="N|LOW:HIGH",
        help="Number of worker processes. LOW:HIGH lets it change within these bounds; the run then begins with one "
        "worker a CPU core, within the bounds, or with those of --mesh. [default: 1, or those of --mesh]",
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar=NAMED,
        help='A policy that adapts the run while it trains, such as "gns:max_batch=2048". May be repeated. See '
        "docs/policies.md.",
    ),
]
Monitors = Annotated[
    list[str] | None,
    typer.Option(
        "--monitor",
        metavar=NAMED,
        help='Something to measure during training, such as "noise_scale:every=10". May be repeated.',
    ),
]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Write event files for TensorBoard into OUT/tensorboard.")
]
Heartbeat = Annotated[
    str, typer.Option(metavar="TIME", help="Count a worker as lost once it has been silent for this long.")
]
Grace = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help=HELP["grace_s"] + ", such as 60s. The same command with --resume takes them over. [default: they do not]",
    ),
]
Sync = Annotated[
    str,
    typer.Option(
        help="When workers exchange what they have learned. allreduce: gradients, in every step. "
        "local:learners=8,every=16: 8 learners take 16 steps of their own each, then become their mean. "
        "diloco, averaging, gossip, pair_averaging and parameter_server are written likewise. The strategy shows in "
        "the result; the number of workers does not. See docs/sync.md."
    ),
]
SyncSchedule = Annotated[
    str,
    typer.Option(
        help="Other strategies for --sync from given steps on, such as "
        "'1000=local:learners=8,every=16; 5000=allreduce'."
    ),
]
CollectiveTimeout = Annotated[str, typer.Option(metavar="TIME", help=HELP["collective_timeout_s"])]
Chaos = Annotated[
    str | None,
    typer.Option(
        metavar="FAULTS",
        help="Inject faults, for tests: kill, stop, join, leave, notice, reshape. At random with a rate per second "
        '("kill:0.05/s,stop"; 0.05/s where none is given), or once ("kill@40%" of the run, "kill@step:120").',
    ),
]
ChaosVerify = Annotated[
    bool,
    typer.Option(
        "--chaos-verify",
        help="With --chaos: train again on one worker without faults, and compare. Exit code 1 where the states "
        "differ, and where no fault, or not every one with a point of its own, has happened.",
    ),
]
NoticeFile = Annotated[
    Path | None,
    typer.Option(
        help="A file that appears when this machine is about to be taken away. The command then stops in good order "
        "and exits with code 75."
    ),
]
NoticeUrl = Annotated[
    str | None,
    typer.Option(
        help="A URL that answers 404 until this machine is about to be taken away. It is asked again and again. The "
        "command then stops as for --notice-file."
    ),
]
CloudNotices = Annotated[
    str | None,
    typer.Option(
        "--notices",
        metavar="aws|google|azure[=URL]",
        help="A cloud whose metadata service says when this machine is about to be taken away. The command then stops "
        "as for --notice-file. =URL asks another address, such as a proxy.",
    ),
]
NoticeSeconds = Annotated[
    float, typer.Option(help="Seconds between a notice and the machine's end, where the notice does not say.")
]
