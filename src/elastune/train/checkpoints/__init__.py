"""A run's state: in memory, on disk, handed to another worker or run."""
