"""Who is in, and when a change counts: membership, its coordinator, and the hand-over of state."""
