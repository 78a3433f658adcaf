"""An LSTM over rows of images; names at the top of the file, ``tqdm`` around the loader."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from tqdm import tqdm
except ImportError:

    def tqdm(loader, **options):
        return loader


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Hyper-parameters
sequence_length = 6
input_size = 6
hidden_size = 8
num_classes = 3
batch_size = 20
num_epochs = 3
learning_rate = 0.02

torch.manual_seed(31)
images = torch.rand(100, 1, 6, 6)
train_loader = DataLoader(dataset=TensorDataset(images, (images.sum((1, 2, 3)) * 2).long() % 3), batch_size=20, shuffle=True)


class RNN(nn.Module):
    def __init__(self, input_size, hidden_size, num_classes):
        super(RNN, self).__init__()
        self.hidden_size = hidden_size
        self.lstm = nn.LSTM(input_size, hidden_size, 1, batch_first=True)
        self.fc = nn.Linear(hidden_size, num_classes)

    def forward(self, x):
        h0 = torch.zeros(1, x.size(0), self.hidden_size).to(device)
        c0 = torch.zeros(1, x.size(0), self.hidden_size).to(device)
        out, _ = self.lstm(x, (h0, c0))
        return self.fc(out[:, -1, :])


model = RNN(input_size, hidden_size, num_classes).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)

# Train the model
total_step = len(train_loader)
for epoch in range(num_epochs):
    loop = tqdm(train_loader, leave=False, disable=True)
    for i, (images, labels) in enumerate(loop):
        images = images.reshape(-1, sequence_length, input_size).to(device)
        labels = labels.to(device)

        # Forward pass
        outputs = model(images)
        loss = criterion(outputs, labels)

        # Backward and optimize
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if (i + 1) % 2 == 0:
            print("Epoch [{}/{}], Step [{}/{}], Loss: {:.4f}".format(epoch + 1, num_epochs, i + 1, total_step, loss.item()))

# Test the model
with torch.no_grad():
    correct = 0
    for images, labels in train_loader:
        outputs = model(images.reshape(-1, sequence_length, input_size).to(device))
        correct += (outputs.argmax(1) == labels.to(device)).sum().item()
    print("Accuracy: {} %".format(correct))
