"""One epoch of SimCLR as one would write it by hand, with the layers of the encoder "tiny".

python benchmarks/against/bare_loop.py IMAGES.npz WEIGHTS.pt
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad


def view(images: Tensor) -> Tensor:
    """Crop a batch, flip some images, and change their brightness."""
    top, left = torch.randint(0, 9, (2,)).tolist()
    images = pad(images, (4, 4, 4, 4), mode="reflect")[..., top : top + 32, left : left + 32]
    images = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(-1), images)
    return images * (0.6 + 0.8 * torch.rand(len(images), 1, 1, 1))


def block(inside: int, outside: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.ReLU())


data = np.load(sys.argv[1])
images = torch.from_numpy(data["images"]).permute(0, 3, 1, 2).float() / 255
encoder = nn.Sequential(block(3, 32, 1), block(32, 64, 2), block(64, 128, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
head = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
optimiser = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 1e-3)
for rows in torch.randperm(len(images)).split(64):
    z = normalize(head(encoder(torch.cat([view(images[rows]), view(images[rows])]))), dim=1)
    scores = (z @ z.T / 0.5).fill_diagonal_(-torch.inf)
    loss = cross_entropy(scores, torch.arange(len(z)).roll(len(z) // 2))
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
torch.save(encoder.state_dict(), sys.argv[2])
