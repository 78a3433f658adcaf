"""How one replica of a model lies on workers."""
