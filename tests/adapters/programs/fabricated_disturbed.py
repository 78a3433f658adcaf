"""The script of ``fabricated.py``, whose workers are lost where a loss is computed, in training and in evaluation."""

from __future__ import annotations

import fabricated
import torch.nn.functional as F
from losing import losing

from elastune.adapters import fabric

config = fabricated.config
plain = F.cross_entropy


def main() -> None:
    assert fabric.Fabric is fabricated.Fabric
    F.cross_entropy = losing(plain)
    fabricated.main()
