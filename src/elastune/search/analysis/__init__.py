"""What a search has found."""
