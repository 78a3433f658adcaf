"""A transformer network by perceptual losses of a frozen one; sub-commands; several losses in one sum."""

import argparse
import sys

import numpy as np
import torch
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset


class TransformerNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.in1 = torch.nn.InstanceNorm2d(4, affine=True)
        self.conv2 = torch.nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x):
        return self.conv2(torch.relu(self.in1(self.conv1(x))))


class Features(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 5, 3)
        for param in self.parameters():
            param.requires_grad = False

    def forward(self, x):
        return torch.relu(self.conv(x))


def gram_matrix(y):
    (b, ch, h, w) = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


def train(args):
    device = torch.device("cpu")
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    train_dataset = TensorDataset(torch.rand(40, 3, 6, 6), torch.zeros(40))
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size)
    transformer = TransformerNet().to(device)
    optimizer = Adam(transformer.parameters(), args.lr)
    mse_loss = torch.nn.MSELoss()
    vgg = Features().to(device)
    style = torch.rand(1, 3, 6, 6).repeat(args.batch_size, 1, 1, 1)
    gram_style = gram_matrix(vgg(style))
    for e in range(args.epochs):
        transformer.train()
        agg_content_loss = 0.0
        count = 0
        for batch_id, (x, _) in enumerate(train_loader):
            n_batch = len(x)
            count += n_batch
            optimizer.zero_grad()
            x = x.to(device)
            y = transformer(x)
            features_y = vgg(y)
            features_x = vgg(x)
            content_loss = args.content_weight * mse_loss(features_y, features_x)
            style_loss = args.style_weight * mse_loss(gram_matrix(features_y), gram_style[:n_batch, :, :])
            total_loss = content_loss + style_loss
            total_loss.backward()
            optimizer.step()
            agg_content_loss += content_loss.item()
            if (batch_id + 1) % args.log_interval == 0:
                print(f"Epoch {e + 1}: [{count}/{len(train_dataset)}] {agg_content_loss / (batch_id + 1):.6f}")


def stylize(args):
    print("not in this example", args.content_image)


def main():
    main_arg_parser = argparse.ArgumentParser(description="parser for style")
    subparsers = main_arg_parser.add_subparsers(title="subcommands", dest="subcommand")
    train_arg_parser = subparsers.add_parser("train", help="parser for training arguments")
    train_arg_parser.add_argument("--epochs", type=int, default=2)
    train_arg_parser.add_argument("--batch-size", type=int, default=4)
    train_arg_parser.add_argument("--seed", type=int, default=42)
    train_arg_parser.add_argument("--content-weight", type=float, default=10.0)
    train_arg_parser.add_argument("--style-weight", type=float, default=100.0)
    train_arg_parser.add_argument("--lr", type=float, default=1e-3)
    train_arg_parser.add_argument("--log-interval", type=int, default=5)
    eval_arg_parser = subparsers.add_parser("eval", help="parser for evaluation")
    eval_arg_parser.add_argument("--content-image", type=str, required=True)
    args = main_arg_parser.parse_args()
    if args.subcommand is None:
        print("ERROR: specify either train or eval")
        sys.exit(1)
    if args.subcommand == "train":
        train(args)
    else:
        stylize(args)


if __name__ == "__main__":
    main()
