Pruner=None
with_estimates=None
