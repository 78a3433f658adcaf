"""Collectives over ``torch.distributed``."""
