"""Workers on other machines: an agent on each owns its processes, and a launcher here tells the agents what to do."""
