"""The script of ``hugging.py``, whose workers are lost where a loss is computed, in training and in evaluation."""

from __future__ import annotations

import hugging
from losing import losing

from elastune.adapters.transformers import Trainer

config = {**hugging.config, "faults": [], "epochs": 2}
plain = Trainer.compute_loss


def main() -> None:
    Trainer.compute_loss = losing(plain)
    hugging.config.update(config)
    hugging.main()
