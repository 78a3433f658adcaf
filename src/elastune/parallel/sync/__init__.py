"""When and how the replicas of a run come together."""
