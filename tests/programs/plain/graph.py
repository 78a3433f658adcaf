"""A graph network: each epoch is one step over the whole graph."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(inputs, outputs))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x, adjacency):
        return adjacency @ (x @ self.kernel)


class GCN(nn.Module):
    def __init__(self, dropout_p=0.1):
        super().__init__()
        self.gc1 = GraphConv(8, 6)
        self.gc2 = GraphConv(6, 3)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, input_tensor, adj_mat):
        x = self.dropout(F.relu(self.gc1(input_tensor, adj_mat)))
        return F.log_softmax(self.gc2(x, adj_mat), dim=1)


def train_iter(epoch, model, optimizer, criterion, input, target, mask_train, mask_val, print_every=10):
    model.train()
    optimizer.zero_grad()
    output = model(*input)
    loss = criterion(output[mask_train], target[mask_train])
    loss.backward()
    optimizer.step()
    loss_val, acc_val = test(model, criterion, input, target, mask_val)
    if epoch % print_every == 0:
        print(f"Epoch: {epoch:04d} loss_train: {loss.item():.4f} loss_val: {loss_val:.4f} acc_val: {acc_val:.4f}")


def test(model, criterion, input, target, mask):
    model.eval()
    with torch.no_grad():
        output = model(*input)
        output, target = output[mask], target[mask]
        return criterion(output, target).item(), (output.argmax(dim=1) == target).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Graph network")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--dropout-p", type=float, default=0.5)
    parser.add_argument("--val-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    features = torch.rand(30, 8)
    adj_mat = torch.softmax(torch.rand(30, 30) * 4, dim=1)
    labels = (features.sum(1) * 2).long() % 3
    idx = torch.randperm(len(labels))
    idx_train, idx_val = idx[:20], idx[20:]

    gcn = GCN(args.dropout_p).to(device)
    optimizer = Adam(gcn.parameters(), lr=args.lr, weight_decay=5e-4)
    criterion = nn.NLLLoss()

    for epoch in range(args.epochs):
        train_iter(epoch + 1, gcn, optimizer, criterion, (features, adj_mat), labels, idx_train, idx_val, args.val_every)
