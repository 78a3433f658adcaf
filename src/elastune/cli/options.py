"""The options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(help="The program: a Python file that defines train(session).")]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER|URL",
        help="Folder for the journal, logs and report, or a URL that fsspec can open, such as s3://bucket/run. "
        "[default: the next free elastune-out/NAME-COMMAND-N]",
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue what is in --out. With nothing there, start from the beginning."),
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
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Override a value of the program's config, such as lr=0.01. May be repeated.",
    ),
]
Data = Annotated[Path | None, typer.Option(help="Folder of the data sets, instead of $ELASTUNE_DATA.")]
Epochs = Annotated[
    int | None,
    typer.Option(help="Number of epochs (passes over the data), instead of what the program passes to session.epochs."),
]
Seed = Annotated[int, typer.Option(help="Seed for everything that is random.")]
Divergence = Annotated[
    str,
    typer.Option(
        metavar="FACTOR|off",
        help="End a training as failed when its loss stays above FACTOR times the loss at its start. A loss that is "
        "not finite always fails; with off, nothing else does.",
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        help="exact: the same weights for any number of workers; fast: weights that are equal within rounding."
    ),
]
Slots = Annotated[
    int | None,
    typer.Option(
        help="Number of equal shares that each global batch is cut into. It shows in the result. "
        "[default: 8, or more for more workers]"
    ),
]
MicroBatch = Annotated[int | None, typer.Option(help="Most samples in one forward pass. [default: no limit]")]
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
Budget = Annotated[
    str | None, typer.Option(metavar="TIME", help="Wall time that the search may take, such as 90s, 3m or 1.5h.")
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
    typer.Option(
        "--constraint",
        metavar="TEXT",
        help='A condition that settings or metrics must fulfil, such as "workers * micro_batch == 4096" or '
        '"accuracy >= 0.9". May be repeated.',
    ),
]
Sampler = Annotated[
    str,
    typer.Option(
        help="What proposes the settings of the next trial: auto, random, grid, tpe, gp, nsga2, nsga3, genetic or "
        "cmaes. See docs/spaces.md."
    ),
]
Stopping = Annotated[
    str,
    typer.Option(
        metavar="NAME[:OPTION=VALUE,...]",
        help="Early stopping: none, asha, hyperband or pbt (population-based training), such as "
        "asha:eta=3,min_resource=1. See docs/studies.md.",
    ),
]
Keep = Annotated[
    str,
    typer.Option(
        metavar="RULE",
        help="Trials whose weights and predictions are kept: none, all, front, best[:K] by each objective, "
        "diverse[:K] (predictions that differ most), last:K. Join several with +, such as front+last:3.",
    ),
]
KeepSize = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most disk space for what --keep keeps, such as 500MB or 2GB."),
]
WarmStart = Annotated[
    list[Path] | None,
    typer.Option(
        help="Output folder of an earlier study. Its best settings are tried first, and the sampler learns from its "
        "trials as far as they compare. May be repeated."
    ),
]
TrialWorkers = Annotated[
    str | None,
    typer.Option(
        metavar="LOW:HIGH",
        help="Share the workers out among the trials that run. Each has LOW to HIGH workers, and their number changes "
        "while it trains.",
    ),
]
Allocation = Annotated[
    str,
    typer.Option(
        metavar="NAME[:OPTION=VALUE,...]",
        help="How --trial-workers shares workers out: steepest (each worker goes where it adds most) or short_first "
        "(the same, and the longest trials wait). See docs/studies.md.",
    ),
]
WorkerHours = Annotated[
    float | None, typer.Option(help="Worker-hours (workers x hours) that all trials together may use.")
]
Until = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help='End once a trial has reached this, such as "accuracy >= 0.98". May be repeated: one trial must then '
        "reach all of them.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help='Measure the seconds of training until a report reaches this, such as "accuracy >= 0.97", as the metric '
        "seconds_to_target.",
    ),
]
Patience = Annotated[
    int | None,
    typer.Option(
        help="End after this many trials in a row without a better one. With --sampler genetic it counts generations."
    ),
]
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
Price = Annotated[
    float, typer.Option(help="Price of a worker-hour in dollars. At 1, a cost is the number of worker-hours.")
]
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
        metavar="NAME[:OPTION=VALUE,...]",
        help='A policy that adapts the run while it trains, such as "gns:max_batch=2048". May be repeated. See '
        "docs/policies.md.",
    ),
]
Monitors = Annotated[
    list[str] | None,
    typer.Option(
        "--monitor",
        metavar="NAME[:OPTION=VALUE,...]",
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
        help="How long workers train on if this command dies, such as 60s. The same command with --resume takes them "
        "over. [default: they do not]",
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
CollectiveTimeout = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="How long workers wait for a worker that is alive but does not take part in an exchange."
    ),
]
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
    typer.Option("--chaos-verify", help="With --chaos: train again on one worker without faults, and compare."),
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
