"""elastune: train and tune PyTorch models on a changing set of workers, so that accuracy never pays for scale."""
