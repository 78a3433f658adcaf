"""Files between hosts and their controller, where they share no folder: agents push checkpoints, and fetch them."""
