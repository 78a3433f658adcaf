"""The pure membership machine and the thread that serves it."""
