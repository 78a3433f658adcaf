"""Studies: what ``elastune tune`` is asked, the loop that searches, and what was found."""
