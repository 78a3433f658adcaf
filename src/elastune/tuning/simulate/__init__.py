"""The study loop on a virtual clock and a simulated cluster."""
