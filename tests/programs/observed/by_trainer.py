"""A right script as people write it for Hugging Face's Trainer."""

import sys
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(256, 20, generator=generator), torch.randint(0, 4, (256,), generator=generator)

    def __len__(self):
        return 256

    def __getitem__(self, at):
        return {"x": self.x[at], "labels": self.y[at]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=int(sys.argv[1]),
            num_train_epochs=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            learning_rate=1e-3,
        )
        Trainer(Net(), arguments, train_dataset=Rows()).train()


if __name__ == "__main__":
    main()
