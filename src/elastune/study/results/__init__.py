"""The results of a study."""
