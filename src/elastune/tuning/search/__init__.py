"""History in, suggestion out."""
