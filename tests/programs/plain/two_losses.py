"""Two losses of one batch over a shared trunk, with ``retain_graph``, and a third of another pass."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(14)
x = torch.rand(90, 6)
train_loader = DataLoader(TensorDataset(x, x.mean(1, keepdim=True), (x[:, 0] > 0.5).long()), batch_size=15, shuffle=True)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
        self.value = nn.Linear(10, 1)
        self.label = nn.Linear(10, 2)

    def forward(self, x):
        h = self.trunk(x)
        return self.value(h), self.label(h)


model = TwoHeads()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for epoch in range(3):
    for data, value, label in train_loader:
        optimizer.zero_grad()
        first, second = model(data)
        loss_value = nn.functional.mse_loss(first, value)
        loss_value.backward(retain_graph=True)
        loss_label = nn.functional.cross_entropy(second, label)
        loss_label.backward()
        penalty = 1e-3 * model(data * 0.5)[0].pow(2).mean()
        penalty.backward()
        optimizer.step()
