"""What a study came to."""
