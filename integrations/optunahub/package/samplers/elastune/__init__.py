"""The package ``samplers/elastune`` of OptunaHub: everything is in elastune itself."""

from elastune.optuna import Pruner, Sampler, with_estimates

__all__ = ["Pruner", "Sampler", "with_estimates"]
