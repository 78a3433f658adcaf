"""What is searched: parameters, objectives, constraints."""
