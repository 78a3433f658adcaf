"""Tables, plots and pages; reads the journal, computes no new truth."""
