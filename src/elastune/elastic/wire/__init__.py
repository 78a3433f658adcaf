"""What coordinator, workers and controller send each other."""
