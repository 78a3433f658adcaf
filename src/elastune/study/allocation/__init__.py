"""Who gets the workers."""
