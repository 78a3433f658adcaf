"""A worker's side: its connection, its group, and how it recovers with the others."""
