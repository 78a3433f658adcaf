"""The page that shows runs, studies and frontiers while they work, and steers them. It reads journals alone."""
