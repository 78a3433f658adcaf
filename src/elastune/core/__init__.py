"""Values that everyone shares: no torch, no input or output."""
