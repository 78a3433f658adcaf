"""The commands of a cluster's plan. A command runs as it is printed on its cluster, or it is not printed.

A command names the cluster, the device and the settings of the program that the plan changes. ``elastune tune``
needs a search space in the program's file. If the file has none, the answer lists what to add.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastune.core.formatting import count, number
from elastune.core.plan.cluster_plan import ClusterPlan
from elastune.core.plan.search_time import SearchModel
from elastune.core.run import Config, Program
from elastune.train.program.load import load_as_guest, merge
from elastune.train.program.space import corners
from elastune.tuning.cluster_plan.measured_plans import BATCH, training_of
from elastune.tuning.study.run_command import own_arguments, run_command

PLACEHOLDER = "--cluster hosts:7070 --token-file elastune.token --interface eth0"
"""The cluster in the commands of a plan for several nodes, if the user did not name a cluster."""


@dataclass(frozen=True)
class ProgramFacts:
    """What a program's file allows in commands.

    Attributes:
        batch_settable: Whether commands can set ``batch_size``.
        lacks: The code that the file needs before ``elastune tune`` can search it; "" if it has all of it.
        chosen: Settings that its space chooses, so that commands must not set them.
    """

    batch_settable: bool
    lacks: str = ""
    chosen: tuple[str, ...] = ()


def program_facts(program: Program, config: Config, seed: int = 0) -> ProgramFacts:
    """Load the file of ``program`` and find what commands can set.

    Args:
        program: The program.
        config: Settings that replace its own.
        seed: The seed of the space's first sample.

    Returns:
        What the file allows in commands.

    Raises:
        UserError: For a file that cannot be loaded, and for a setting that it does not have.

    Example:
        >>> program_facts(Program(Path("train.py")), {}).lacks
        ''
    """
    loaded = load_as_guest(program, seed)
    settings = merge(loaded.config, config)
    if loaded.space is None:
        also = "" if loaded.objectives else ', and objectives = {"accuracy": "max"} (or --objective accuracy:max)'
        lacks = f'def space(trial): return {{"lr": trial.suggest_float("lr", 1e-4, 1.0, log=True)}}{also}'
        return ProgramFacts(BATCH in settings, lacks)
    lacks = "" if loaded.objectives else 'objectives = {"accuracy": "max"}, or --objective accuracy:max in the command'
    sampled = {name for sample in corners(loaded.space, seed) for name in sample.values}
    return ProgramFacts(BATCH in settings, lacks, tuple(sorted(sampled)))


def command_of(
    plan: ClusterPlan,
    program: Program,
    config: Mapping[str, Any],
    seed: int,
    own_batch: int,
    *,
    copies: int = 1,
    device: str | None = None,
    where: str = "",
) -> str:
    """Return the command that trains once as ``plan`` does.

    Args:
        plan: The plan.
        program: The program.
        config: Settings that replace its own.
        seed: The run's seed.
        own_batch: The program's own batch, which needs no setting.
        copies: Holders of each part of divided state.
        device: The value of ``--device``; None: the machine's device.
        where: Options that name the cluster; "": this machine.

    Returns:
        One line for a POSIX shell.

    Example:
        >>> command_of(plan, Program(Path("train.py")), {}, 0, 64, where="--cluster slurm:nodes=2")
        'elastune run train.py --mode fast ... --cluster slurm:nodes=2'
    """
    command = _options_of(plan, program, config, seed, own_batch, copies, device)
    return (f"{command} {where}" if where else command) + own_arguments(program.arguments)


def _options_of(
    plan: ClusterPlan,
    program: Program,
    config: Mapping[str, Any],
    seed: int,
    own_batch: int,
    copies: int = 1,
    device: str | None = None,
) -> str:
    """The command without the options of a cluster and the program's own arguments."""
    execution = training_of(plan, copies).execution
    settings = {**config, **({} if plan.batch == own_batch else {BATCH: plan.batch})}
    options = {name: value for name, value in execution.to_json().items() if value is not None and name != "device"}
    if device is not None:
        options["device"] = device
    return run_command(str(program.path), settings, options, seed, data=program.data_text)


def search_command_of(
    plan: ClusterPlan,
    program: Program,
    config: Mapping[str, Any],
    seed: int,
    own_batch: int,
    search: SearchModel,
    sampler: str = "auto",
    *,
    chosen: tuple[str, ...] = (),
    **more: Any,
) -> str:
    """Return the command that searches as ``plan`` does, with its number of trainings at once and in all.

    Args:
        plan: The plan.
        program: The program.
        config: Settings that replace its own.
        seed: The search's seed.
        own_batch: The program's own batch.
        search: The model of the search.
        sampler: The sampler of the search.
        chosen: Settings that the program's space chooses; the command leaves them out.
        more: Further keywords of ``command_of``.

    Returns:
        One line for a POSIX shell.

    Example:
        >>> search_command_of(plan, program, {}, 0, 64, search)
        'elastune tune train.py ... --workers 16 --trials 212'
    """
    batch = own_batch if BATCH not in chosen else plan.batch  # a batch chosen by the space is not set
    where = more.pop("where", "")
    config = {name: value for name, value in config.items() if name not in chosen}
    command = _options_of(plan, program, config, seed, batch, **more).replace("elastune run ", "elastune tune ", 1)
    stopping = "" if search.kept == 1 else " --stopping asha"
    by = "" if sampler == "auto" else f" --sampler {sampler}"
    words = f"{command} --workers {plan.workers} --trials {trials_of(plan, search)}{by}{stopping}"
    return (f"{words} {where}" if where else words) + own_arguments(program.arguments)


def trials_of(plan: ClusterPlan, search: SearchModel) -> int:
    """How many trainings the search needs with the number at once of ``plan``."""
    return math.ceil(float(search.needed(np.array([float(plan.width)]))[0]))


def trials_note(plan: ClusterPlan, search: SearchModel) -> str:
    """Return why the search's command has another number of trials than ``--runs``; "" if it has the same.

    Args:
        plan: The plan of the command.
        search: The model of the search.

    Returns:
        The reason, with the figures that it rests on.

    Example:
        >>> trials_note(plan, search)
        '--trials 692: --runs 128 counts trainings one after another. ...'
    """
    trials = trials_of(plan, search)
    if trials == search.runs:
        return ""
    within = search.crowding_within
    source = "as you said"
    if within is not None:
        source = f"80 % of simulated studies {within[0]:.1%} to {within[1]:.1%}"
    bound = ""
    if trials >= search.runs * search.blind:
        bound = f", up to the {number(search.blind)} x that random search needs"
    return (
        f"--trials {trials:,}: --runs {search.runs:,} counts trainings one after another. With {plan.width:,} at once "
        f"proposals know less of one another: each further one at once costs {search.crowding:.1%} more trainings "
        f"({source}){bound}. --crowding sets your own figure"
    )


def placeholder_note(nodes: int) -> str:
    """How to replace ``PLACEHOLDER`` on a cluster of so many nodes."""
    return (
        f"the cluster was not named (--cluster), so the commands have a placeholder: {PLACEHOLDER}. Put in your port, "
        f"token file and network interface, and start on each of the {count(nodes, 'node')} elastune agent --join "
        "HOST:7070 --token-file elastune.token. With Slurm or Ray, plan with --cluster slurm:... or ray"
    )


def lacks_note(lacks: str) -> str:
    """The code to add to a program's file before it can be searched."""
    return f"no search command: elastune tune cannot search this program before its file has {lacks}"
