"""The one loop of searches, frontiers, warm starts and simulations, and what it is made of."""
