"""A notebook in one file: a loop at the top, an evaluation between, numbers in capitals, a running mean."""

# %%
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split

# %%
LEARNING_RATE = 0.01
N_EPOCHS = 3
DROPOUT = 0.2
torch.manual_seed(60)
np.random.seed(60)

# %%
features = torch.tensor(np.random.rand(120, 5), dtype=torch.float32)
labels = (features[:, :1] > features[:, 1:2]).float()
train_set, val_set = random_split(TensorDataset(features, labels), [96, 24])
train_dl, val_dl = DataLoader(train_set, 16, shuffle=True), DataLoader(val_set, 24)

# %%
net = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(12, 1))
print(f"{sum(p.numel() for p in net.parameters())} parameters")
optimiser = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
history = {"train": [], "val": []}

# %%
for epoch in range(N_EPOCHS):
    net.train()
    running = 0.0
    for xb, yb in train_dl:
        optimiser.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(net(xb), yb)
        loss.backward()
        optimiser.step()
        running += loss.item() * len(xb)
    net.eval()
    with torch.no_grad():
        val = sum(((net(xb) > 0) == yb.bool()).float().sum().item() for xb, yb in val_dl) / len(val_set)
    history["train"].append(running / len(train_set))
    history["val"].append(val)
    print(f"""epoch {epoch}:
    loss {history["train"][-1]:.4f}, accuracy {val:.3f}""")

# %%
print(f"best {max(history['val']):.3f}")
