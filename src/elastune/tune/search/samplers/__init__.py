"""History in, suggestion out (Optuna beneath)."""
