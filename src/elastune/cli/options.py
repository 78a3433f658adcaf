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
        help="For journal, logs and report; a URL is fsspec's. [default: the next free elastune-out/NAME-COMMAND-N]",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what --out holds.")]
FromDcp = Annotated[
    Path | None,
    typer.Option("--from-dcp", metavar="DIR", help="Begin with the weights of a torch.distributed.checkpoint."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; everything else on stderr.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Override a value of the program's config.")
]
Data = Annotated[Path | None, typer.Option(help="Folder of data sets, instead of $ELASTUNE_DATA.")]
Epochs = Annotated[int | None, typer.Option(help="Override what the program asks of session.epochs.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Divergence = Annotated[
    str,
    typer.Option(
        metavar="FACTOR|off",
        help="A training has failed once its loss is FACTOR times that of its start; off: once it is not finite.",
    ),
]
Mode = Annotated[str, typer.Option(help="exact: the same weights for any worker count; fast: equal within rounding.")]
Slots = Annotated[
    int | None, typer.Option(help="Shares that a batch is cut into. [default: 8, or more for more workers]")
]
MicroBatch = Annotated[int | None, typer.Option(help="Samples of one forward pass at most.")]
Precision = Annotated[str, typer.Option(help="fp32 or bf16.")]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="AXIS=N,...",
        help="The workers as a grid, instead of --workers: data=2,shard=2,tensor=1,pipeline=1. See docs/meshes.md.",
    ),
]
Mechanism = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[+NAME...]",
        help="How a replica lies on workers: replicated, zero or sharded, and with it tensor and pipeline; or fsdp2, "
        "deepspeed, fairscale, horovod. [default: the least that --mesh needs]",
    ),
]
Topology = Annotated[
    str,
    typer.Option(
        metavar="NAME|parents=[...]",
        help="By which routes sums travel: auto, native, ring, tree, binary_tree, star, hierarchical, or for each rank "
        "its parent; then perhaps :chunk_kib=N. See docs/topologies.md.",
    ),
]
Copies = Annotated[
    int | None,
    typer.Option(help="Workers that hold each piece of divided state. [default: 2 where workers may change, else 1]"),
]
VirtualTensor = Annotated[
    int | None,
    typer.Option(help="Blocks that tensor divides layers into, whatever the mesh. [default: 4, or as many as workers]"),
]
Schedule = Annotated[str, typer.Option(help="Of a pipeline: 1f1b, gpipe, interleaved or zero-bubble.")]
ZeroStage = Annotated[int | None, typer.Option(help="What deepspeed or fairscale divide: 1, 2 or 3.")]
Offload = Annotated[bool, typer.Option("--offload", help="Keep optimizer state in the CPU's memory.")]
Compress = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="Send smaller gradients, with --mode fast: bf16, fp16, int8, powersgd:rank=4 or topk:ratio=0.01. It shows "
        "in the result. See docs/compression.md.",
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads of each worker.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Budget = Annotated[str | None, typer.Option(metavar="TIME", help="Wall time: 90s, 3m, 1.5h.")]
Objectives = Annotated[
    list[str] | None, typer.Option("--objective", metavar="NAME:max|min", help="Instead of the program's objectives.")
]
Constraints = Annotated[
    list[str] | None,
    typer.Option("--constraint", metavar="TEXT", help='Such as "workers * micro_batch == 4096" or "accuracy >= 0.9".'),
]
Sampler = Annotated[str, typer.Option(help="auto, random, grid, tpe, gp, nsga2, nsga3, genetic or cmaes.")]
Stopping = Annotated[
    str,
    typer.Option(
        metavar="NAME[:OPTION=VALUE,...]",
        help="Which trials pause, go on, or breed: none, asha, hyperband or pbt, such as asha:eta=3,min_resource=1.",
    ),
]
Keep = Annotated[
    str,
    typer.Option(
        metavar="RULE",
        help="Whose weights and predictions stay: none, all, front, best[:K] by each objective, diverse[:K] "
        "(those that predict most differently), last:K, joined by +.",
    ),
]
KeepSize = Annotated[str | None, typer.Option(metavar="SIZE", help="Of the disk for that at most: 500MB, 2GB.")]
WarmStart = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of an earlier study: try its best settings first, learn from it as far as it compares."),
]
TrialWorkers = Annotated[
    str | None,
    typer.Option(metavar="LOW:HIGH", help="Share the workers out: each running trial has LOW to HIGH, changing live."),
]
Allocation = Annotated[
    str,
    typer.Option(
        metavar="NAME[:OPTION=VALUE,...]",
        help="How --trial-workers shares workers out: short_first, which has the longest trials wait, or steepest.",
    ),
]
WorkerHours = Annotated[float | None, typer.Option(help="Worker-hours that all trials together may use.")]
Until = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help='End once a trial has reached it, such as "accuracy >= 0.98"; several: all of it.'
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help='Take the time to it, as the metric seconds_to_target: such as "accuracy >= 0.97".'
    ),
]
Patience = Annotated[
    int | None, typer.Option(help="End after so many trials (genetic: generations) in a row without a better one.")
]
Prices = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="What a worker-hour costs by kind of host: CSV of kind,price or time,kind,price."
    ),
]
HostKind = Annotated[
    str, typer.Option("--kind", help="With --prices: the kind of hosts that do not tell theirs, such as this machine.")
]
Price = Annotated[float, typer.Option(help="Dollars for a worker-hour; at 1, costs are told as the work itself.")]
Workers = Annotated[
    str | None,
    typer.Option(
        metavar="N|LOW:HIGH",
        help="Worker processes; LOW:HIGH begins with as many of HIGH as there are cores "
        "(or as --mesh says), and may change within these. [default: 1, or those of --mesh]",
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy", metavar="NAME[:OPTION=VALUE,...]", help='What adapts the run, such as "gns:max_batch=2048".'
    ),
]
Monitors = Annotated[
    list[str] | None,
    typer.Option(
        "--monitor", metavar="NAME[:OPTION=VALUE,...]", help='What is measured, such as "noise_scale:every=10".'
    ),
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write event files into OUT/tensorboard.")]
Heartbeat = Annotated[str, typer.Option(metavar="TIME", help="A worker that is silent for this long counts as lost.")]
Grace = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="How long workers go on without this command, should it die: --resume takes them over. [default: not]",
    ),
]
Sync = Annotated[
    str,
    typer.Option(
        help="How workers agree: allreduce, or local:learners=8,every=16 (8 learners take 16 steps of their own each, "
        "then become their mean); diloco, averaging, gossip, pair_averaging likewise. It shows in the result, the "
        "number of workers does not."
    ),
]
SyncSchedule = Annotated[
    str,
    typer.Option(
        help="How workers agree from which steps on, such as '1000=local:learners=8,every=16; 5000=allreduce'."
    ),
]
CollectiveTimeout = Annotated[
    str, typer.Option(metavar="TIME", help="The others wait this long for a worker that lives and does not come.")
]
Chaos = Annotated[
    str | None, typer.Option(metavar="FAULTS", help='Faults on purpose: "kill:0.05/s,stop,join,leave", "kill@40%".')
]
ChaosVerify = Annotated[bool, typer.Option("--chaos-verify", help="Compare with an undisturbed run on one worker.")]
NoticeFile = Annotated[Path | None, typer.Option(help="Once this file is there, checkpoint, end, and exit with 75.")]
NoticeUrl = Annotated[str | None, typer.Option(help="The same once this endpoint answers, as those of clouds do.")]
CloudNotices = Annotated[
    str | None,
    typer.Option(
        "--notices", metavar="aws|google|azure[=URL]", help="The same once this cloud's metadata service tells."
    ),
]
NoticeSeconds = Annotated[float, typer.Option(help="Time that a notice gives where it does not say.")]
