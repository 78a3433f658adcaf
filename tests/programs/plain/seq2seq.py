"""An encoder and a decoder with an optimizer each, padding that the loss ignores, teacher forcing."""

import torch
import torch.nn as nn
from torch import optim
from torch.utils.data import DataLoader, TensorDataset

PAD = 0
hidden_size = 8
batch_size = 10


class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.embedding = nn.Embedding(input_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)

    def forward(self, input):
        return self.gru(self.embedding(input))


class DecoderRNN(nn.Module):
    def __init__(self, hidden_size, output_size):
        super().__init__()
        self.embedding = nn.Embedding(output_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, output_size)

    def forward(self, target, hidden):
        output, hidden = self.gru(torch.relu(self.embedding(target)), hidden)
        return self.out(output), hidden


def train_epoch(dataloader, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion):
    total_loss = 0
    for data in dataloader:
        input_tensor, target_tensor = data
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        encoder_outputs, encoder_hidden = encoder(input_tensor)
        decoder_outputs, _ = decoder(target_tensor.roll(1, 1), encoder_hidden)
        loss = criterion(decoder_outputs.view(-1, decoder_outputs.size(-1)), target_tensor.view(-1))
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
        total_loss += loss.item()
    return total_loss / len(dataloader)


def train(train_dataloader, encoder, decoder, n_epochs, learning_rate=0.01, print_every=2):
    encoder_optimizer = optim.Adam(encoder.parameters(), lr=learning_rate)
    decoder_optimizer = optim.Adam(decoder.parameters(), lr=learning_rate)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    for epoch in range(1, n_epochs + 1):
        loss = train_epoch(train_dataloader, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion)
        if epoch % print_every == 0:
            print("(%d %d%%) %.4f" % (epoch, epoch / n_epochs * 100, loss))


torch.manual_seed(50)
pairs = torch.randint(1, 9, (60, 5))
targets = torch.where(torch.rand(60, 5) < 0.3, torch.zeros_like(pairs), pairs.flip(1))
train_dataloader = DataLoader(TensorDataset(pairs, targets), batch_size=batch_size, shuffle=True)
encoder = EncoderRNN(9, hidden_size)
decoder = DecoderRNN(hidden_size, 9)
train(train_dataloader, encoder, decoder, 3)
