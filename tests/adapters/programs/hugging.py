"""A script written for Hugging Face's ``Trainer``: a tiny GPT-2 on made text; the import says whose trainer it is."""

from __future__ import annotations

import os

import numpy as np
import torch
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainingArguments

if os.environ.get("TRANSFORMERS_ITSELF"):
    from transformers import Trainer
else:
    from elastune.adapters.transformers import Trainer

config = {"lr": 1e-3, "epochs": 3, "batch_size": 8, "patience": 5, "out_": "trainer-out", "dropout": 0.1}


class Text(torch.utils.data.Dataset):
    """Sequences that count upwards in steps of one to four."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        first, step = torch.randint(0, 24, (count, 1), generator=generator), torch.arange(count)[:, None] % 4 + 1
        self.ids = (first + step * torch.arange(12)) % 24

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def accuracy(predicted) -> dict[str, float]:
    words = np.argmax(predicted.predictions, axis=-1)[:, :-1]
    return {"accuracy": float((words == predicted.label_ids[:, 1:]).mean())}


def main() -> None:
    kept = config["dropout"]
    network = GPT2Config(vocab_size=24, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                         resid_pdrop=kept, embd_pdrop=kept, attn_pdrop=kept)  # fmt: skip
    arguments = TrainingArguments(
        config["out_"],
        num_train_epochs=config["epochs"],
        per_device_train_batch_size=config["batch_size"],
        learning_rate=config["lr"],
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=4,
        metric_for_best_model="accuracy",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(network),
        args=arguments,
        train_dataset=Text(64, 1),
        eval_dataset=Text(20, 2),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(config["patience"])],
    )
    trainer.train()


if __name__ == "__main__":
    main()
