"""Layers that train themselves, one after another, each with an optimizer of its own."""

import torch
import torch.nn as nn
from torch.optim import Adam


class Layer(nn.Linear):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.opt = Adam(self.parameters(), lr=0.03)
        self.num_epochs = 5

    def forward(self, x):
        return torch.relu(super().forward(x / (x.norm(2, 1, keepdim=True) + 1e-4)))

    def train_layer(self, x_pos, x_neg):
        for i in range(self.num_epochs):
            g_pos = self.forward(x_pos).pow(2).mean(1)
            g_neg = self.forward(x_neg).pow(2).mean(1)
            loss = torch.log(1 + torch.exp(torch.cat([2.0 - g_pos, g_neg - 2.0]))).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        return self.forward(x_pos).detach(), self.forward(x_neg).detach()


class Net(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = [Layer(dims[d], dims[d + 1]) for d in range(len(dims) - 1)]

    def train_net(self, x_pos, x_neg):
        for layer in self.layers:
            x_pos, x_neg = layer.train_layer(x_pos, x_neg)


if __name__ == "__main__":
    torch.manual_seed(1234)
    x = torch.rand(40, 6)
    Net([6, 8, 8]).train_net(x, x[torch.randperm(40)])
