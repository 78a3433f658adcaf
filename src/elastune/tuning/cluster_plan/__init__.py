"""Which cluster to ask for: predicted without a run."""
