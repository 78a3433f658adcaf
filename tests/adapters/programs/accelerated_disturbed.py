"""The script of ``accelerated.py``, whose workers are lost where a loss is computed, in training and in evaluation."""

from __future__ import annotations

from argparse import Namespace

import accelerated
import torch.nn.functional as F
from losing import losing

from elastune.adapters import accelerate

config = {"faults": [], "num_epochs": 2, "lr": 0.02, "batch_size": 20, "gradient_accumulation_steps": 1, "seed": 1}
config |= {"dropout": 0.1, "in_order": False, "output_dir": ""}
plain = F.cross_entropy


def main() -> None:
    assert accelerate.Accelerator is accelerated.Accelerator
    F.cross_entropy = losing(plain)
    accelerated.training_function(Namespace(**config))
