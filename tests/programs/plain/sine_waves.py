"""A sequence predictor trained with LBFGS on all sequences at once, by a closure."""

import torch
import torch.nn as nn
import torch.optim as optim


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 6)
        self.linear = nn.Linear(6, 1)

    def forward(self, input):
        outputs = []
        h_t = torch.zeros(input.size(0), 6)
        c_t = torch.zeros(input.size(0), 6)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            outputs += [self.linear(h_t)]
        return torch.cat(outputs, dim=1)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = torch.sin(torch.arange(200.0).view(10, 20) / 4)
    input, target = data[:, :-1], data[:, 1:]
    seq = Sequence()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8)
    for i in range(3):
        print("STEP: ", i)

        def closure():
            optimizer.zero_grad()
            out = seq(input)
            loss = criterion(out, target)
            print("loss:", loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
