"""A class that makes its own model and optimizer, with ``train_epoch`` and a scheduler."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Runner(object):
    def __init__(self, lr: float = 0.05, epochs: int = 3):
        torch.manual_seed(21)
        self.epochs = epochs
        self.device = torch.device("cpu")
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to(self.device)
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.RMSprop(self.net.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        x = torch.rand(90, 5)
        self.train_loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=15, shuffle=True)
        self.best = float("inf")

    def train_epoch(self, epoch):
        self.net.train()
        running_loss = 0.0
        for i, (x, y) in enumerate(self.train_loader):
            x, y = x.to(self.device), y.to(self.device)
            self.optimizer.zero_grad()
            loss = self.criterion(self.net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), max_norm=1.0)
            self.optimizer.step()
            running_loss += loss.item()
        return running_loss / (i + 1)

    def run(self):
        for epoch in range(self.epochs):
            loss = self.train_epoch(epoch)
            self.scheduler.step()
            self.best = min(self.best, loss)
            print(f"{epoch}: {loss:.4f}, best {self.best:.4f}")


def main():
    runner = Runner()
    runner.run()


main()
