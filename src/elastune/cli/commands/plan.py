"""``elastune plan``: how to split a cluster, before anything is launched on it."""

from __future__ import annotations

from elastune.cli import options
from elastune.cli.groups import flatten
from elastune.cli.output import OK, print_error, print_json, print_lines, use_data
from elastune.tuning.cluster_plan.settings import PlanSettings


@flatten
def plan(
    file: options.File,
    settings: PlanSettings,
    arguments: options.Arguments = None,
    data: options.Data = None,
    json: options.Json = False,
) -> int:
    """Plan how to split a cluster to tune a program.

    A plan says how many trainings run at once, and on which mesh (data x shard x tensor x pipeline) each of them
    trains. Each plan has its time, cost and memory. All times are modelled: nodes are taken to have this machine's
    workers, those of --device, or those that --probe measures on --cluster.

    One step of FILE is first rehearsed, without workers and without the memory that it takes. If no division has enough
    memory, that is the answer. Then a few short runs on this machine calibrate the model of a step, if this machine has
    the memory. Then every division of the cluster is judged. A plan keeps --deadline if the upper end of its interval
    of time keeps it: in nine cases of ten.

    The commands that are printed run as they are on --cluster. Without it those for several nodes have a placeholder.

    A --sampler other than random, grid and genetic counts as TPE. Of --stopping a plan knows none and asha.

    With --out the answer is kept in a journal, which elastune report and elastune explain read. See docs/planning.md.
    """
    from elastune.core.run import Program
    from elastune.report.plan import plan_lines
    from elastune.tuning.cluster_plan.find_plan import PlanRequest, keep_plan, plan_cluster

    use_data(data)
    request = PlanRequest.of(settings, Program(file, arguments=tuple(arguments or ())), print_error)
    made = keep_plan(request, plan_cluster(request))
    if json:
        print_json({"kind": "plan", **made.answer})
    else:
        print_lines("\n".join(plan_lines(made)))
    return OK
