"""A schedule that is imported by name and steps with each batch, parameter groups, ``len(loader)``, a step count."""

from torch.optim.lr_scheduler import LambdaLR
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(current_step):
        if current_step < num_warmup_steps:
            return float(current_step) / float(max(1, num_warmup_steps))
        left = num_training_steps - current_step
        return max(0.0, float(left) / float(max(1, num_training_steps - num_warmup_steps)))

    return LambdaLR(optimizer, lr_lambda)


def collate(rows):
    return {"input_ids": torch.stack([row[0] for row in rows]), "labels": torch.stack([row[1] for row in rows])}


def training_function(config):
    lr, num_epochs, seed, batch_size = config["lr"], config["num_epochs"], config["seed"], config["batch_size"]
    torch.manual_seed(seed)
    tokens = torch.randint(0, 20, (72, 5))
    train_dataloader = DataLoader(
        TensorDataset(tokens, tokens.sum(1) % 2), shuffle=True, collate_fn=collate, batch_size=batch_size
    )
    model = nn.Sequential(nn.Embedding(20, 6), nn.Flatten(), nn.Linear(30, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    no_decay = ["bias", "3.weight"]
    grouped = [
        {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(grouped, lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=4, num_training_steps=len(train_dataloader) * num_epochs
    )
    completed_steps = 0
    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            outputs = model(batch["input_ids"])
            loss = nn.functional.cross_entropy(outputs, batch["labels"])
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            completed_steps += 1
        print(f"epoch {epoch}: {completed_steps} steps, rate {lr_scheduler.get_last_lr()[0]:.4f}")


def main():
    config = {"lr": 2e-2, "num_epochs": 3, "seed": 42, "batch_size": 12}
    training_function(config)


if __name__ == "__main__":
    main()
