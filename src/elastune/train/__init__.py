"""What the user's loop touches."""
