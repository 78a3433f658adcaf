"""Local workers, forked from a warm process."""
