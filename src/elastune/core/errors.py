"""The errors that users see, and the page of the documentation that explains each of them.

An error has the rule, the value that broke it, and a fix. The module that raises an error decides which page is named.
"""

from __future__ import annotations

import inspect

from elastune.core.formatting import cut, printable

# The page that explains an error, by the room or the file that raises it.

PROGRAMS, PROGRAM = "docs/programs.md", "README.md#your-program"
COMMANDS = "docs/commands-as-programs.md"
EDITS = f"{PROGRAMS}#edits-and-other-data"
# A name covers everything in it; the longest matching name counts.
PAGES = {
    "adapt.monitors": "docs/policies.md",
    "adapt.policies": "docs/policies.md",
    "adapters": f"{PROGRAMS}#scripts-written-for-accelerate",
    "adapters.fabric": f"{PROGRAMS}#scripts-written-for-lightnings-fabric",
    "adapters.lightning": f"{PROGRAMS}#lightnings-trainer",
    "adapters.transformers": f"{PROGRAMS}#hugging-faces-trainer",
    "cli.groups.CommandOptions": COMMANDS,
    "core.command": COMMANDS,
    "runtime.clusters.command": COMMANDS,
    "train.program.cells": "docs/notebooks.md",
    "train.program.command": COMMANDS,
    "train.program.load._loaded_for_command": COMMANDS,
    "tuning.study.run.refuse_other_hosts": COMMANDS,
    "tuning.study.validate.check_command": COMMANDS,
    "cli.app": "docs/extending.md#add-a-command",
    "cli.commands.init": PROGRAMS,
    "cli.commands.init.init": "",
    "cli.commands.simulate.MarketOptions": "docs/spot.md",
    "cli.commands.simulate._recovery": "docs/spot.md",
    "cli.commands.simulate.job_of": "docs/spot.md",
    "cli.convert": f"{PROGRAMS}#bring-your-script",
    "core.communication": "docs/topologies.md",
    "core.communication.Compression": "docs/compression.md",
    "core.mesh": "docs/meshes.md",
    "core.mesh.MechanismName": "",
    "core.mesh_choice": "docs/meshes.md#which-mesh-how-far-does-it-scale",
    "core.plan.batch_size.check_rule": "docs/policies.md",
    "core.plan.data_parallel": "docs/planning.md",
    "core.plan.prices": "docs/spot.md#files",
    "core.plugins": "docs/extending.md",
    "core.run.check_schedule": "docs/sync.md",
    "core.run.check_strategy": "docs/sync.md",
    "core.run.check_verification": "docs/verify.md",
    "core.run.parse_renames": "docs/transfer.md",
    "core.run.refuse_repeated_batches": "docs/sync.md",
    "core.sync_plan": "docs/sync.md",
    "core.sync_plan.SyncSchedule": "docs/sync.md#another-strategy-while-training-goes-on",
    "core.sync_plan.fragments_of": "",
    "core.slots.VerifyPlan": "docs/verify.md",
    "optuna": "docs/optuna.md",
    "parallel.mechanisms": "docs/meshes.md",
    "parallel.mechanisms.deepspeed": "docs/meshes.md#mechanisms-of-other-packages",
    "parallel.mechanisms.horovod": "docs/meshes.md#mechanisms-of-other-packages",
    "parallel.mechanisms.pipeline": "docs/meshes.md#stages",
    "parallel.mechanisms.registry.installed_mechanism": "docs/extending.md#add-a-mechanism",
    "parallel.mechanisms.tensor": "docs/meshes.md#tensor-layers-divided",
    "parallel.sync": "docs/sync.md",
    "runtime": "docs/clusters.md",
    "runtime.agents.transfer_server": "docs/clusters.md#without-a-shared-folder",
    "runtime.clusters.ray": "docs/clusters.md#ray",
    "runtime.clusters.slurm": "docs/clusters.md#slurm",
    "runtime.clusters.slurm_commands": "docs/clusters.md#slurm",
    "runtime.observe": "docs/commands-as-programs.md#is-a-script-right-on-several-processes",
    "runtime.deployment": "docs/clusters.md#kubernetes-and-skypilot",
    "runtime.job": "",
    "runtime.logger": "docs/trackers.md",
    "runtime.job.preflight": PROGRAMS,
    "runtime.job.resumption": f"{PROGRAMS}#going-on-with-a-run",
    "runtime.job.resumption.find_surviving_workers": "",
    "runtime.job.resumption.refuse_unless": EDITS,
    "runtime.job.validation.spot_watch": "docs/spot.md",
    "runtime.settings": "",
    "runtime.spot": "docs/spot.md#files",
    "train": PROGRAMS,
    "train.adaptation": "docs/policies.md",
    "train.checkpoints": f"{PROGRAMS}#state-files-an-end-of-the-programs-own",
    "train.checkpoints.export": "docs/after-the-search.md#taking-it-elsewhere",
    "train.checkpoints.out_folder.claim": PROGRAMS,
    "train.checkpoints.run_folder": "docs/studies.md#which-trials-go-on---stopping",
    "train.checkpoints.run_folder.RunFolder": f"{PROGRAMS}#state-files-an-end-of-the-programs-own",
    "train.checkpoints.run_state": PROGRAMS,
    "train.checkpoints.start_from": "docs/transfer.md",
    "train.collectives": "docs/collectives.md",
    "train.compiling": f"{PROGRAMS}#compiled-models",
    "train.data": f"{PROGRAMS}#data",
    "train.data.fingerprint": EDITS,
    "train.data.stream": f"{PROGRAMS}#streams",
    "train.losses": f"{PROGRAMS}#a-loss-that-is-no-mean-over-samples",
    "train.losses.FeatureGradients": f"{PROGRAMS}#losses-that-compare-samples-of-the-batch",
    "train.losses.SliceEncoder": f"{PROGRAMS}#losses-that-compare-samples-of-the-batch",
    "train.losses.gathered": f"{PROGRAMS}#losses-that-compare-samples-of-the-batch",
    "train.losses.refuse_gathering": f"{PROGRAMS}#losses-that-compare-samples-of-the-batch",
    "train.models": f"{PROGRAMS}#several-models-and-optimizers",
    "train.models.Tracked": f"{PROGRAMS}#state-files-an-end-of-the-programs-own",
    "train.models._load": f"{PROGRAMS}#state-files-an-end-of-the-programs-own",
    "train.models.unfreezing": f"{PROGRAMS}#frozen-for-a-while",
    "train.models.untracked_scaler": f"{PROGRAMS}#mixed-precision-of-the-programs-own",
    "train.predictions": "docs/ensembles.md#what-a-program-does-for-it",
    "train.program": "docs/spaces.md",
    "train.program.arguments": f"{PROGRAMS}#arguments-of-the-programs-own",
    "train.program.load": PROGRAM,
    "train.program.load._check_stands_before": f"{PROGRAMS}#what-to-take-out-of-a-program",
    "train.program.load._refusing": f"{PROGRAMS}#what-to-take-out-of-a-program",
    "train.program.loops": f"{PROGRAMS}#the-loop-over-batches",
    "train.program.source": EDITS,
    "train.progress": "docs/sync.md",
    "train.rehearsal": PROGRAM,
    "train.rehearsal.rehearse_apart": PROGRAMS,
    "train.session.Session._start_collective": "docs/collectives.md",
    "train.session.Session.once": f"{PROGRAMS}#state-files-an-end-of-the-programs-own",
    "train.session.Session.predictions": "docs/ensembles.md#what-a-program-does-for-it",
    "train.session.Session.save_best": f"{PROGRAMS}#state-files-an-end-of-the-programs-own",
    "train.session.Session.start_from": "docs/transfer.md#in-a-program",
    "train.session.Session.stop": f"{PROGRAMS}#state-files-an-end-of-the-programs-own",
    "train.session.Session.track": f"{PROGRAMS}#state-files-an-end-of-the-programs-own",
    "train.session.Session.unfreeze": "docs/transfer.md#in-a-program",
    "train.step": f"{PROGRAMS}#several-losses-of-a-batch",
    "train.step.TrainingLoop": PROGRAMS,
    "train.agreement.steps_differ": f"{PROGRAMS}#what-elastune-check-finds",
    "train.training_state": f"{PROGRAMS}#frozen-for-a-while",
    "train.worker": "docs/gpu.md",
    "tuning.cluster_plan": "docs/planning.md",
    "tuning.frontier": "docs/frontier.md",
    "tuning.reuse": "docs/ensembles.md",
    "tuning.reuse.class_tree": "docs/transfer.md#from-coarse-to-fine-groups-of-classes",
    "tuning.reuse.composed_models": "docs/transfer.md#sub-problems-under-one-head",
    "tuning.reuse.composed_models.best_kept": "docs/ensembles.md",
    "tuning.reuse.composed_models.stacked_parts": "docs/ensembles.md",
    "tuning.reuse.predictions": "docs/ensembles.md#what-a-program-does-for-it",
    "tuning.reuse.predictions.ModelHooks": "docs/ensembles.md",
    "tuning.reuse.predictions._PredictionWriter": "docs/ensembles.md",
    "tuning.reuse.predictions.hooks_of": "docs/ensembles.md",
    "tuning.reuse.predictions.predict": "docs/ensembles.md",
    "tuning.reuse.predictions.score_for": "docs/ensembles.md",
    "tuning.reuse.saved_models.save_composed": "docs/transfer.md#sub-problems-under-one-head",
    "tuning.reuse.soup": "docs/ensembles.md#soups-one-models-inference",
    "tuning.reuse.soup.ancestor": "docs/ensembles.md",
    "tuning.reuse.soup.fresh_statistics": "docs/ensembles.md",
    "tuning.reuse.transfer": "docs/transfer.md",
    "tuning.reuse.tree_training": "docs/transfer.md#from-coarse-to-fine-groups-of-classes",
    "tuning.search": "docs/spaces.md",
    "tuning.search.constraint.parse_target": "docs/studies.md#time-to-a-target---target-text",
    "tuning.search.front": "docs/after-the-search.md#which-trial-to-take",
    "tuning.search.gaussian": "docs/studies.md",
    "tuning.search.genetic": "docs/studies.md",
    "tuning.search.population": "docs/studies.md#which-trials-go-on---stopping",
    "tuning.search.registry": "docs/studies.md",
    "tuning.search.registry.make_schedule": "docs/studies.md#which-trials-go-on---stopping",
    "tuning.search.suggester": "docs/studies.md",
    "tuning.simulate": "docs/simulate.md",
    "tuning.study": "docs/studies.md",
    "tuning.study.validate._refuse_contradictions": "docs/spaces.md",
    "tuning.study.validate.check_feasible": "docs/spaces.md",
}


def page_of(module: str) -> str:
    """Return the page and heading that explain the errors of ``module`` ("elastune.train.data.source.f"); "" if none
    does.
    """
    package, _, name = module.partition(".")
    while package == "elastune" and name:
        if name in PAGES:
            return PAGES[name]
        name = name.rpartition(".")[0]
    return ""


# The errors of elastune: a user, a file or a machine has broken a rule, or a training has diverged.

LONGEST = 3000  # characters of each part of a message: what is longer hides the others


class UserError(Exception):
    """A broken rule, in one line: the rule, the value that broke it, the fix, and a page with more.

    The command line prints it and exits with code 2; it changes nothing that exists. Unless the fix names a page, the
    page is that of the module which raises the error.

    Args:
        rule: What must hold, as a sentence: "a batch holds at least one sample".
        value: The value that breaks the rule.
        fix: What to do about it.
        page: The page of an error from another process (``parts``); None: the page of the caller's module.

    Example:
        >>> raise UserError("a batch holds at least one sample", 0, "use --set batch_size=64")
    """

    def __init__(self, rule: str, value: object, fix: str, page: str | None = None) -> None:
        super().__init__(rule, value, fix)
        self.rule = rule
        self.value = value
        self.fix = fix
        if page is None:
            here = inspect.currentframe()
            maker = None if here is None else here.f_back
            page = "" if maker is None else page_of(f"{maker.f_globals.get('__name__', '')}.{maker.f_code.co_qualname}")
            del here, maker  # else the frame keeps the objects of all callers
        self.page = page

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """The four parts for another process, where ``UserError(*parts)`` is the same error."""
        return self.rule, str(self.value), self.fix, self.page

    def __str__(self) -> str:
        rule, shown, fix = (cut(text, LONGEST) for text in (self.rule, " ".join(str(self.value).split()), self.fix))
        line = printable(f"{rule} (got {shown}): {fix}")
        return line if not self.page or ".md" in fix else f"{line} ({self.page})"


class Diverged(Exception):
    """A loss or metric is not finite, or has exploded: a result of the settings, not a bug.

    In a study such a trial is infeasible; the study keeps the reason and goes on.
    """
