"""Train an encoder on two views of each item, with a diagnosis of the negatives, and measure it before and after.

    python train_loop.py

Needs the extra `eval` for the digits of scikit-learn. Change `load`, `augment` and `encoder` for your own data.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import normalize

import hardneg as hn

NEGATIVES, TEMPERATURE, EPOCHS, BATCH = "Tilt(0.5)", 0.2, 20, 128


def load() -> tuple[Tensor, Tensor]:
    """Items [n, ...] and labels [n]; the labels are used to measure only."""
    data, labels = load_digits(return_X_y=True)
    return torch.tensor(data, dtype=torch.float32) / 16, torch.tensor(labels)


def augment(items: Tensor) -> Tensor:
    """A random view of each item: shifted by up to one pixel, with noise."""
    shifts = torch.randint(-1, 2, (len(items), 2)).tolist()
    images = [torch.roll(item, shift, (0, 1)) for item, shift in zip(items.view(-1, 8, 8), shifts, strict=True)]
    return torch.stack(images).flatten(1) + 0.1 * torch.randn_like(items)


def nearest_accuracy(encoder: nn.Module, items: Tensor, labels: Tensor) -> float:
    """Share of views whose nearest other item has their label."""
    with torch.no_grad():
        views, vectors = (normalize(encoder(each), dim=-1) for each in (augment(items), items))
    similarity = (views @ vectors.T).fill_diagonal_(-2)
    return float((labels[similarity.argmax(1)] == labels).float().mean())


def main() -> None:
    torch.manual_seed(0)
    items, labels = load()
    encoder = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    loss = hn.ContrastiveLoss(NEGATIVES, TEMPERATURE)
    optimiser = torch.optim.AdamW(encoder.parameters(), 3e-3)
    print(f"before: 1-NN accuracy {nearest_accuracy(encoder, items, labels):.3f}")
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(items))[: len(items) // BATCH * BATCH].split(BATCH):
            z1, z2 = encoder(augment(items[rows])), encoder(augment(items[rows]))
            value = loss(z1, z2, ids=rows)  # ids: positions in the data set
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
        if (epoch + 1) % 5:
            continue
        found = loss.diagnose(z1.detach(), z2.detach(), ids=rows, labels=labels[rows]).summary()
        print(f"epoch {epoch + 1}: loss {value.item():.3f}, hardness {found['hardness']:.2f} against "
              f"{found['uniform_hardness']:.2f}, false negatives {found['false_negatives']:.1%}")  # fmt: skip
    print(f"after: 1-NN accuracy {nearest_accuracy(encoder, items, labels):.3f}")
    with torch.no_grad():
        audit = hn.audit(
            encoder(items), [NEGATIVES, "Uniform()"], labels=labels, temperature=TEMPERATURE, frontier=False
        )
    print(audit.table())


if __name__ == "__main__":
    main()
