"""A module and a ``Trainer`` of Lightning's, as its examples are, on made data; its strategy says where it trains."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy

if not os.environ.get("LIGHTNING_ITSELF"):
    from elastune.adapters.lightning import ElastuneStrategy

config = {"faults": [], "epochs": 3, "lr": 0.02, "shuffle": True, "dropout": 0.1, "patience": 3, "options": {}}
config |= {"accumulate": 1, "scale": 0.0, "divide": False}


class Classifier(LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(config["dropout"]), nn.Linear(16, 2))
        self.told: list[float] = []
        self.seen = 0
        self.right = BinaryAccuracy()

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return F.cross_entropy(self.net(inputs), targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self.net(inputs)
        self.log("loss", F.cross_entropy(outputs, targets), batch_size=len(targets))
        self.right(outputs.argmax(1), targets)
        self.log("right", self.right, on_step=False, on_epoch=True)
        self.seen += len(targets) * (not self.trainer.sanity_checking)
        self.log("accuracy", (outputs.argmax(1) == targets).float().mean(), batch_size=len(targets))

    def on_train_epoch_end(self):
        self.told.append(float(self.trainer.callback_metrics["loss"]))
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("seen", float(self.seen))
        self.seen = 0

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=config["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


def loaders(shuffle: bool) -> tuple[DataLoader, DataLoader]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(110, 6, generator=generator)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
    train, test = TensorDataset(x[:60], y[:60]), TensorDataset(x[60:], y[60:])
    return DataLoader(train, 20, shuffle=shuffle), DataLoader(test, 16)


def main() -> list[float]:
    options = {} if os.environ.get("LIGHTNING_ITSELF") else {"strategy": ElastuneStrategy(config["divide"])}
    options |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {
        "enable_model_summary": False,
        "gradient_clip_val": 1.0,
        "accumulate_grad_batches": config["accumulate"],
    }
    if config["scale"]:
        options["plugins"] = [
            MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=config["scale"]))
        ]
    options |= {"callbacks": [EarlyStopping("loss", patience=config["patience"])]} | config["options"]
    trainer = Trainer(max_epochs=config["epochs"], accelerator="cpu", devices=1, **options)
    module = Classifier()
    trainer.fit(module, *loaders(config["shuffle"]))
    return module.told
