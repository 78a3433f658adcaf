"""One model of a step: seconds and bytes of many plans at once, as formulas over arrays."""
