"""A replica whose layers lie in stages on several workers, and the user's loop stays as it is."""
