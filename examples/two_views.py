"""Train an encoder on two views with tilted, debiased negatives (HCL), and print what the negatives were like.

    python examples/two_views.py

Synthetic data: 512 points around 16 centres; a view is a point with noise. Replace `view` and `encoder` by yours.
"""

import torch
from torch import Tensor, nn

import hardneg as hn

torch.manual_seed(0)
centres = torch.randn(16, 32)
labels = torch.arange(512) % 16
points = centres[labels] + 0.3 * torch.randn(512, 32)


def view(batch: Tensor) -> Tensor:
    return batch + 0.2 * torch.randn_like(batch)


encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
loss = hn.ContrastiveLoss("Tilt(1.0)", temperature=0.5, tau_plus=0.05)  # DCL: tau_plus; HCL: the tilt as well

for epoch in range(5):
    for rows in torch.randperm(len(points)).split(128):
        value = loss(encoder(view(points[rows])), encoder(view(points[rows])), ids=rows)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {value.item():.3f}")

with torch.no_grad():
    found = loss.diagnose(encoder(view(points)), encoder(view(points)), labels=labels).summary()
print(f"mean similarity of the negatives {found['hardness']:.3f}, of all candidates {found['uniform_hardness']:.3f}")
print(f"false negatives {found['false_negatives']:.1%}, effective temperature {found['effective_temperature']:.2f}")
