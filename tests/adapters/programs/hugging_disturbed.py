"""The script of ``hugging.py``, whose workers are lost where a loss is computed, in training and in evaluation."""

from __future__ import annotations

import hugging

import elastune
from elastune.adapters.transformers import Trainer
from elastune.testing.faults import inject

config = {**hugging.config, "faults": [], "epochs": 2}
plain = Trainer.compute_loss


def main() -> None:
    session, reaches = elastune.current_session(), []

    def reached(*given, **options):
        if not reaches:
            reaches.append(inject(session))
        reaches[0]("loss")
        return plain(*given, **options)

    Trainer.compute_loss = reached
    hugging.config.update(config)
    hugging.main()
