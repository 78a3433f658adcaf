"""Tables, as data and as text."""
