"""A right script as people write it for Lightning, which starts its own processes."""

import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(0)
    x, y = torch.randn(256, 20), torch.randint(0, 4, (256,))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(sys.argv[1]),
        strategy="ddp" if int(sys.argv[1]) > 1 else "auto",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(x, y), int(sys.argv[2]), shuffle=True))


if __name__ == "__main__":
    main()
