"""Search, study and frontier: many trainings, and what comes of them."""
