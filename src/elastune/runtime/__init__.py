"""Where processes run, and how one training is run on them."""
