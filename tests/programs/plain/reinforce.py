"""A policy gradient with an environment of its own: each episode is one step, until the reward is high."""

import argparse
from itertools import count

import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical

parser = argparse.ArgumentParser(description="REINFORCE")
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--log-interval", type=int, default=10)
args = parser.parse_args()
torch.manual_seed(args.seed)


class Walk:
    """A walk on a line: a reward for each step away from the middle."""

    def reset(self):
        self.place = 0
        return torch.tensor([0.0, 1.0])

    def step(self, action):
        self.place += 1 if action else -1
        return torch.tensor([float(self.place), 1.0]), float(abs(self.place)), abs(self.place) > 4


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine = nn.Linear(2, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        return torch.softmax(self.affine(x), dim=-1)


env = Walk()
policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)


def select_action(state):
    m = Categorical(policy(state))
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode():
    R = 0
    policy_loss = []
    returns = []
    for r in policy.rewards[::-1]:
        R = r + args.gamma * R
        returns.insert(0, R)
    for log_prob, R in zip(policy.saved_log_probs, torch.tensor(returns)):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.stack(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]


def main():
    running_reward = 10
    for i_episode in count(1):
        state = env.reset()
        ep_reward = 0
        for t in range(1, 200):
            action = select_action(state)
            state, reward, done = env.step(action)
            policy.rewards.append(reward)
            ep_reward += reward
            if done:
                break
        running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
        finish_episode()
        if i_episode % args.log_interval == 0:
            print(f"Episode {i_episode}: last {ep_reward:.2f}, average {running_reward:.2f}")
        if i_episode > 25:
            break


if __name__ == "__main__":
    main()
