"""One model on several workers: collectives, mechanisms, strategies."""
