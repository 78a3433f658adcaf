"""``make_train_step`` returns the function that trains; early stopping by patience; steps until a number of them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_step(model, batch, optimizer, loss_fn):
    inputs, targets = batch
    predictions = model(inputs)
    loss = loss_fn(predictions, targets, )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main(max_steps=18, patience=50):
    torch.manual_seed(40)
    x = torch.rand(70, 3)
    loader = DataLoader(TensorDataset(x, x @ torch.tensor([[1.0], [2.0], [-1.0]])), batch_size=10, shuffle=True)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    loss_fn = nn.HuberLoss(reduction="mean")
    step = 0
    best, waited = float("inf"), 0
    while step < max_steps:
        for batch in loader:
            loss = train_step(model, batch, optimizer, loss_fn)
            step += 1
            if loss < best:
                best, waited = loss, 0
            else:
                waited += 1
            if step >= max_steps or waited > patience:
                break
    print(f"{step} steps, best {best:.4f}")


if __name__ == "__main__":
    main()
