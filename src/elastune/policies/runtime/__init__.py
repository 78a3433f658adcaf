"""How hooks are called, and what they may ask of other workers."""
