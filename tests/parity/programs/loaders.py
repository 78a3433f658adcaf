"""A DataLoader with a weighted sampler, random augmentation and a collate function of its own, as people have it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from elastune.testing.faults import inject

config = {"epochs": 2, "faults": []}


class Noisy(Dataset):
    """A sample is another one each time that it is drawn."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(5)
        self.x = torch.rand(60, 8, generator=source)
        self.y = torch.randint(0, 3, (60,), generator=source)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index] + 0.1 * torch.randn(8), int(self.y[index])


def collate(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.tensor([y for _, y in samples])}


def train(session) -> None:
    data = Noisy()
    weights = [3.0 if y == 0 else 1.0 for y in data.y]
    rare = WeightedRandomSampler(weights, 80, generator=torch.Generator().manual_seed(9))
    loader = DataLoader(data, batch_size=16, sampler=rare, collate_fn=collate, drop_last=True)
    check = DataLoader(data, batch_size=20, collate_fn=collate, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    reach = inject(session)
    for _ in session.epochs(session.config["epochs"]):
        for batch in session.batches(loader):
            reach("before")
            session.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
            reach("after")
            optimizer.step()
            optimizer.zero_grad()
        right = seen = 0.0
        for batch in session.batches(check, train=False):
            right += float((model(batch["x"]).argmax(1) == batch["y"]).sum())
            seen += len(batch["y"])
        session.report(accuracy=session.sum(right) / session.sum(seen), seen=session.sum(seen))
