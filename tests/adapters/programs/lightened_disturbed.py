"""The module of ``lightened.py``, whose workers are lost where a loss is computed, in training and in evaluation."""

from __future__ import annotations

import lightened
import torch.nn.functional as F
from losing import losing

from elastune.adapters import lightning

config = lightened.config
plain = F.cross_entropy


def main() -> None:
    assert lightning.ElastuneStrategy is lightened.ElastuneStrategy
    F.cross_entropy = losing(plain)
    lightened.main()
