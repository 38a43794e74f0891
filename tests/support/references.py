"""Numbers of the authors' code that come from a bug or an accident, which the product does not have as options.

Written from the formulas, not from the code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus


def jsd_hard_of_hcl_graph(nodes: Tensor, graphs: Tensor, batch: Tensor, beta: float, tau_plus: float = 0.5) -> Tensor:
    """HCL's graph loss as its code has it. Four things differ from the paper:

    The weight is exp(-2 beta q / max |q|), with the opposite sign, so that it prefers easy graphs. Debiasing adds
    tau_plus / (1 - tau_plus) softplus(p) to the loss instead of subtracting it. Masked entries are zeros that stay in
    the sums (a constant (G - 1) log 2 at tau_plus = 0.5) and in the mean of each row's weights. And log 2 is
    divided by 1 - tau_plus only for beta = 0.
    """
    log_2, num_graphs = math.log(2.0), len(graphs)
    own = one_hot(batch, num_graphs).to(nodes.dtype)
    dots = nodes @ graphs.T
    p, q = dots * own, dots * (1.0 - own)
    positive = log_2 - softplus(-p) - tau_plus / (1.0 - tau_plus) * softplus(p)
    if beta == 0:
        negative = (softplus(q) - log_2) / (1.0 - tau_plus)
    else:
        weight = torch.exp(-2.0 * beta * q / q.abs().max())
        negative = weight / weight.mean(dim=1, keepdim=True) * softplus(q) / (1.0 - tau_plus) - log_2
    return negative.sum() / (len(nodes) * (num_graphs - 1)) - positive.sum() / len(nodes)


def supcon_of_one_view(z: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """SupCon given a single view per instance, where a label that occurs once leaves an anchor without a positive.

    The code then counts that anchor as 0 and still divides by all anchors.
    """
    scores = z @ z.T / temperature
    self = torch.eye(len(z), dtype=torch.bool)
    positive = (labels[:, None] == labels) & ~self
    log_p = scores - scores.masked_fill(self, -math.inf).logsumexp(dim=1, keepdim=True)
    return -((log_p * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()
