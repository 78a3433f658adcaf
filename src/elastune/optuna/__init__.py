"""elastune's search and early stopping for a script that calls ``study.optimize`` of Optuna.

``Sampler`` proposes and ``Pruner`` stops as ``elastune tune`` does: both call its code. See docs/optuna.md.

Example:
    >>> study = optuna.create_study(directions=["minimize", "minimize"], sampler=elastune.optuna.Sampler())
    >>> pruner = elastune.optuna.Pruner(study)
"""

from elastune.optuna.pruner import Pruner as Pruner
from elastune.optuna.pruner import with_estimates as with_estimates
from elastune.optuna.sampler import Sampler as Sampler
