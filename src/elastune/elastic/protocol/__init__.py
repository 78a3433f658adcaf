"""What coordinator, workers and clients say to each other."""
