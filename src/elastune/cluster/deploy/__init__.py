"""Files that have other systems start a controller and its agents: rendered from a few facts, not run by us."""
