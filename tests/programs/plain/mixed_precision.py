"""Autocast and a gradient scaler, with clipping of unscaled gradients."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset

use_amp = True
device = "cpu"
lr = 0.05
epochs = 3


def make_model(in_size, out_size, num_layers):
    layers = []
    for _ in range(num_layers - 1):
        layers += [nn.Linear(in_size, in_size), nn.ReLU()]
    layers.append(nn.Linear(in_size, out_size))
    return nn.Sequential(*layers).to(device)


torch.manual_seed(6)
data = TensorDataset(torch.rand(64, 8), torch.rand(64, 2))
loader = DataLoader(data, batch_size=8, shuffle=True)
loss_fn = nn.MSELoss()

net = make_model(8, 2, 3)
opt = torch.optim.SGD(net.parameters(), lr=lr)
scaler = GradScaler("cpu", enabled=use_amp, init_scale=128.0)
for epoch in range(epochs):
    for input, target in loader:
        with autocast(device_type=device, dtype=torch.bfloat16, enabled=use_amp):
            output = net(input)
            loss = loss_fn(output.float(), target)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
