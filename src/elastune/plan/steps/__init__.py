"""One form of a step: seconds and bytes of many plans at once, and seconds of data parallelism alone."""
