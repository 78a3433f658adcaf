"""The script of ``fabricated.py``, whose workers are lost where a loss is computed, in training and in evaluation."""

from __future__ import annotations

import fabricated
import torch.nn.functional as F

import elastune
from elastune.adapters import fabric
from elastune.testing.faults import inject

config = dict(fabricated.config)
plain = F.cross_entropy


def main() -> None:
    assert fabric.Fabric is fabricated.Fabric
    session, reaches = elastune.current_session(), []
    fabricated.config.update(session.config)

    def reached(*given, **options):
        if not reaches:
            reaches.append(inject(session))
        reaches[0]("loss")
        return plain(*given, **options)

    F.cross_entropy = reached
    fabricated.main()
