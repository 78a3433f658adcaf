"""Which samples a worker loads, and the record of those that were used."""
