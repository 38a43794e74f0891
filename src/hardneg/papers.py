"""The losses of published papers, one function each, with the values of the authors unless noted otherwise.

Every function returns a callable that computes a scalar. The callables do not normalize: pass unit vectors.
docs/explanation/papers.md lists where a paper and its code differ. This file is the only definition of each paper:
``registered()`` returns those that a recipe of ``hardneg train`` trains, with the options of the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.errors import argument_error
from hardneg.core.generators import MoCHi, SynCo
from hardneg.core.objectives import RINCE, ISogCLR, info_nce, jsd, reduce
from hardneg.core.published import BANK_TEMPERATURE, CMC_DRAWS, INSTANCE_DRAWS, MOCO
from hardneg.core.schedules import Number
from hardneg.core.scoring import cross_views, from_matrix, score
from hardneg.core.tensors import widened
from hardneg.core.types import NEVER, Keys, View
from hardneg.core.views import Pools
from hardneg.losses.bank import CMC, InstanceDiscrimination
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.losses.global_softmax import EMC2, SogCLR
from hardneg.losses.individual import IndividualTemperatures
from hardneg.losses.neighbours import neighbour_nce
from hardneg.losses.paper import registered as registered
from hardneg.losses.paper import trained_by
from hardneg.negatives import Gaussian, Negatives, OtherLabel, Rank, Ring, Threshold, Tilt, Uniform
from hardneg.state.cache import Cache, EncodeRows, cache_loss
from hardneg.state.clusters import Clusters
from hardneg.state.pools import Bank

Loss = Callable[..., Tensor]
LossAndFound = Callable[..., tuple[Tensor, Annotated[Tensor, "n n"]]]


@trained_by("simclr")
def simclr(temperature: float = 0.5) -> ContrastiveLoss:
    """NT-Xent of SimCLR (Chen et al. 2020), averaged over the 2b anchors; Google's code returns twice that.

    Args:
        temperature: Divides the similarities.

    Example:
        >>> z1, z2 = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1)
        >>> simclr()(z1, z2).ndim
        0
    """
    return ContrastiveLoss(Uniform(), temperature, normalize=False)


@trained_by("simclr")
def debiased(temperature: float = 0.5, tau_plus: float = 0.1) -> ContrastiveLoss:
    """Debiased contrastive learning (Chuang et al. 2020), with one positive.

    Args:
        temperature: Divides the similarities.
        tau_plus: Probability that a sampled negative has the anchor's class.
    """
    return ContrastiveLoss(Uniform(), temperature, tau_plus, normalize=False)


@trained_by("simclr")
def hcl(temperature: float = 0.5, tau_plus: float = 0.1, beta: Number = 1.0) -> ContrastiveLoss:
    """HCL (Robinson et al. 2021): tilted hard negatives with debiasing; the gradient flows through the weights.

    Args:
        temperature: Divides the similarities.
        tau_plus: Probability that a sampled negative has the anchor's class.
        beta: Strength of the tilt; 0 gives the debiased loss.
    """
    return ContrastiveLoss(Tilt(beta), temperature, tau_plus, normalize=False)


@trained_by("supervised")
def supcon(temperature: float = 0.07) -> ContrastiveLoss:
    """L_out of SupCon (Khosla et al. 2020), without the authors' factor temperature / 0.07.

    Call it with ``labels``. All other views of the anchor's label are positives.
    """
    return ContrastiveLoss(
        OtherLabel(), temperature, positives="label", positives_in_denominator="all", normalize=False
    )


@trained_by("supervised")
def scl(temperature: float = 0.5) -> ContrastiveLoss:
    """The SCL with which H-SCL is compared (Jiang et al. 2024); it is not SupCon.

    All positives of the anchor's label enter a pooled mean over pairs, with M = 2b - 2.
    """
    return _pooled(OtherLabel(), temperature)


@trained_by("supervised")
def hscl(temperature: float = 0.5, beta: Number = 1.0, detach: bool = False) -> ContrastiveLoss:
    """H-SCL(beta) (Jiang et al. 2024): tilted negatives of other labels.

    Args:
        temperature: Divides the similarities.
        beta: Strength of the tilt.
        detach: Whether to stop the gradient through the weights.
    """
    return _pooled(OtherLabel() * Tilt(beta, detach=detach), temperature)


@trained_by("supervised")
def hscl_threshold(temperature: float = 0.5, threshold: Number = 0.0) -> ContrastiveLoss:
    """H-SCL(tau) (Jiang et al. 2024): negatives of other labels above a threshold; the authors published no code.

    The paper anneals the threshold: ``linear(start, end, inclusive=True)`` over the epochs.

    Args:
        temperature: Divides the similarities.
        threshold: Lowest cosine l of a negative; the paper's tau is e^(l / temperature).
    """
    return _pooled(OtherLabel() * Threshold(threshold), temperature)


@trained_by("moco")
def moco(temperature: float | None = None, version: str = "v1") -> Loss:
    """MoCo (He et al. 2020): queries against a queue of keys, where the key k of each query q is its positive.

    Call it as ``loss(q, k, pool=queue)`` and push k to the queue afterwards.

    Args:
        temperature: Divides the similarities; by default 0.07 in v1 and 0.2 in v2.
        version: "v1", "v2" or "v3"; "v3" is ``moco_v3``.
    """
    if version not in MOCO:
        raise argument_error("moco", f"a version among {', '.join(MOCO)}", "version", version)
    temperature = MOCO[version].temperature if temperature is None else temperature
    return moco_v3(temperature) if version == "v3" else _against_pool(Uniform(), temperature)


@trained_by("moco")
def ring(
    temperature: float = MOCO["v1"].temperature, inner: Number = 0.1, outer: Number = 1.0, dynamic_inner: bool = True
) -> ContrastiveLoss:
    """MoCoRing (Wu et al. 2021): MoCo with the negatives restricted to a ring of ranks.

    The paper anneals the outer edge: ``outer=linear(1.0, 0.1)``. The arguments are those of ``Ring``.
    """
    return _against_pool(Ring(inner, outer, dynamic_inner), temperature)


@trained_by("moco", version="v2")
def mochi(
    temperature: float = MOCO["v2"].temperature,
    num_hardest: int = 1024,
    num_mixed: int = 1024,
    num_with_anchor: int = 128,
    seed: int = 0,
) -> ContrastiveLoss:
    """MoCHi (Kalantidis et al. 2020): MoCo with mixtures of the hardest negatives as additional candidates.

    Args:
        temperature: Divides the similarities.
        num_hardest: Number of hardest candidates that are mixed.
        num_mixed: Number of mixtures of two of them.
        num_with_anchor: Number of mixtures of one of them with the anchor.
        seed: Seed of the mixtures.
    """
    made = MoCHi(num_hardest, num_mixed, num_with_anchor, seed)
    return _against_pool(Uniform(), temperature, generate=made)


@trained_by("moco", version="v2")
def synco(temperature: float = MOCO["v2"].temperature, num_hardest: int = 1024, seed: int = 0) -> ContrastiveLoss:
    """SynCo (Giakoumoglou and Stathaki 2024): MoCo with six kinds of synthetic negatives as additional candidates.

    Args:
        temperature: Divides the similarities.
        num_hardest: Number of hardest candidates that they are made from.
        seed: Seed of the draws.
    """
    return _against_pool(Uniform(), temperature, generate=SynCo(num_hardest, seed=seed))


@trained_by("simclr")
def adnce(temperature: float = 0.5, mu: Number = 0.7, sigma: Number = 1.0) -> ContrastiveLoss:
    """ADNCE (Wu et al. 2023): Gaussian weights, so that the closest candidates count less again.

    The weights are detached, as in the authors' code. The arguments are those of ``Gaussian``.
    """
    return ContrastiveLoss(Gaussian(mu, sigma, detach=True), temperature, normalize=False)


@trained_by("simclr")
def rince(temperature: float = 0.5, q: float = 0.5, lam: float = 0.01) -> ContrastiveLoss:
    """RINCE (Chuang et al. 2022): a symmetric loss that is robust to false positives.

    Args:
        temperature: Divides the similarities.
        q: Robustness; q -> 0 gives InfoNCE, q = 1 the fully symmetric loss.
        lam: Weight of the second term, which holds the positive and the negatives.
    """
    return ContrastiveLoss(Uniform(), temperature, objective=RINCE(q, lam), normalize=False)


def isogclr(num_instances: int, start: float = 0.7, rho: float = 0.3, gamma: float = 0.9) -> IndividualTemperatures:
    """ISogCLR (Qiu et al. 2023): a learnt temperature and a running normaliser per instance; call with ``ids``.

    Args:
        num_instances: Size of the data set.
        start: Temperature of all instances at the beginning.
        rho: The robustness parameter of the objective.
        gamma: Share of a new value in the running normaliser; 1 for the loss of the batch.

    Example:
        >>> z1, z2 = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1)
        >>> isogclr(num_instances=100)(z1, z2, ids=torch.arange(8)).ndim
        0
    """
    loss = ContrastiveLoss(objective=ISogCLR(rho), normalize=False)
    return IndividualTemperatures(loss, num_instances, start, gamma=gamma)


@trained_by("moco", version="v3")
def moco_v3(temperature: float = MOCO["v3"].temperature) -> Loss:
    """MoCo v3 (Chen et al. 2021), one direction: 2 * temperature * InfoNCE of q against the keys of the batch.

    The paper adds the swapped direction: ``loss(q1, k2) + loss(q2, k1)``.
    """
    inner = ContrastiveLoss(Uniform(), temperature, views="cross", normalize=False)

    def loss(q: View, k: View, ids: Tensor | None = None) -> Tensor:
        value: Tensor = 2.0 * temperature * inner(q, k.detach(), ids)
        return value

    loss.inner = inner  # type: ignore[attr-defined]
    return loss


def fnc(temperature: float = 0.1, num_found: int = 10, threshold: float = 0.7, attract: bool = True) -> LossAndFound:
    """False-negative cancellation (Huynh et al. 2022): candidates like any view of the instance are false negatives.

    Call it as ``loss(views, ids)`` with a list of v views, [b, d] each: all are anchors, and those beyond two are the
    support set. It returns the loss and the mask of the false negatives that were found, [v b, v b]. The loss is the
    mean over the anchors; that of the authors' code, which only attracts, is twice as large.

    Args:
        temperature: Divides the similarities.
        num_found: Number of false negatives of each instance, at most: those with the highest similarity to any of
            its views.
        threshold: Similarity above which a candidate is a false negative.
        attract: Whether false negatives become positives (eq. 4) or are left out (eq. 3).
    """

    def loss(views: Sequence[View], ids: Tensor | None = None) -> tuple[Tensor, Annotated[Tensor, "n n"]]:
        z, number = torch.cat(list(views)), len(views)
        rows = torch.arange(len(views[0]), device=z.device) if ids is None else ids
        instance = rows.repeat(number)  # [v b]
        with torch.autocast(z.device.type, enabled=False):
            similarity = widened(z) @ widened(z).T  # [v b, v b]
        other = instance[:, None] != instance
        closest = similarity.detach().view(number, len(rows), -1).amax(0)  # [b, v b], over the views of the instance
        closest = closest.masked_fill(~other[: len(rows)], -torch.inf)
        best = closest.topk(min(num_found, closest.shape[1]), dim=1).indices
        found = torch.zeros_like(closest, dtype=torch.bool).scatter_(1, best, True) & (closest > threshold)
        found = found.repeat(number, 1)  # [v b, v b]
        own = ~other & ~torch.eye(len(z), dtype=torch.bool, device=z.device)
        scores = from_matrix(similarity, own | found if attract else own, temperature, valid=other & ~found)
        losses = info_nce(scores, Uniform().log_weights(scores), positives_in_denominator="all" if attract else "own")
        return reduce(losses, scores), found

    return loss


def simcse(temperature: float = 0.05, hard_negative_weight: float = 0.0) -> Loss:
    """SimCSE (Gao et al. 2021): cross views, and optionally one explicit hard negative per row, shared by all rows.

    Call it as ``loss(z1, z2)`` or ``loss(z1, z2, hard)``.

    Args:
        temperature: Divides the similarities.
        hard_negative_weight: Added to the logit of a row's own hard negative, as in the authors' code.
    """

    def loss(z1: View, z2: View, hard: View | None = None) -> Tensor:
        extra = () if hard is None else Keys(hard, source="mined")
        scores = cross_views(z1, z2, temperature, extra=extra)
        log_w = Uniform().log_weights(scores)
        if hard is not None and hard_negative_weight:
            own = torch.eye(len(z1), len(hard), dtype=log_w.dtype, device=log_w.device)
            log_w = log_w + torch.nn.functional.pad(hard_negative_weight * own, (len(z2), 0))
        return reduce(info_nce(scores, log_w, num_negatives="mass"), scores)

    return loss


@trained_by("graphcl")
def graphcl(temperature: float = 0.2) -> ContrastiveLoss:
    """GraphCL (You et al. 2020): one direction, without the positive in the denominator, so it can be negative."""
    return ContrastiveLoss(Uniform(), temperature, views="cross", positives_in_denominator="none", normalize=False)


def infograph(negatives: Negatives = Uniform(), tau_plus: float = 0.0) -> Loss:
    """JSD loss of InfoGraph (Sun et al. 2020): nodes against the graphs of the batch, by raw dot products.

    Call it as ``loss(local, pooled, batch)`` with the vectors of the nodes [b, d], those of the graphs [n, d], and the
    graph of each node [b]. ``negatives=ClippedTilt(beta), tau_plus=...`` is HCL on graphs with the paper's sign.
    """

    def loss(
        local: Annotated[Tensor, "b d"], pooled: Annotated[Tensor, "n d"], batch: Annotated[Tensor, "b"]
    ) -> Tensor:
        graphs = Keys(pooled, torch.arange(len(pooled), device=pooled.device))
        scores = score(Keys(local, batch), pooled[batch], graphs, temperature=1.0)
        return reduce(jsd(scores, negatives.log_weights(scores), tau_plus=tau_plus), scores)

    return loss


def quick_thoughts(context_size: int = 1) -> Loss:
    """Quick-thoughts (Logeswaran and Lee 2018): row i of u predicts its neighbours i +- context_size in v.

    u and v are vectors of consecutive sentences, compared by raw dot products. The sentence itself stays in the softmax
    with a logit of 0.
    """

    def loss(u: View, v: View) -> Tensor:
        distance = (torch.arange(len(u), device=u.device)[:, None] - torch.arange(len(v), device=u.device)).abs()
        with torch.autocast(u.device.type, enabled=False):
            similarity = (widened(u) @ widened(v).T).masked_fill(distance == 0, 0.0)
        scores = from_matrix(similarity, (distance > 0) & (distance <= context_size))
        return reduce(info_nce(scores, Uniform().log_weights(scores), positives_in_denominator="all"), scores)

    return loss


def sogclr(num_instances: int, temperature: float = 0.1, gamma: float = 0.9) -> SogCLR:
    """SogCLR (Yuan et al. 2022): the global loss through a running normaliser per instance; call with ``ids``.

    The value is the authors' surrogate: two directions are added and not divided by the temperature;
    ``last["real_loss"]`` is the loss. The first visit of each instance sets its normaliser. For image and text use
    ``SogCLR(..., views="cross")``.

    Args:
        num_instances: Size of the data set.
        temperature: Divides the similarities.
        gamma: Share of a new value in the running normaliser.

    Example:
        >>> z1, z2 = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1)
        >>> sogclr(num_instances=100)(z1, z2, ids=torch.arange(8)).ndim
        0
    """
    return SogCLR(num_instances, temperature, gamma)


def emc2(
    num_instances: int,
    temperature: float = 0.07,
    burn_in: float = 0.5,
    *,
    proposals: str = "batch",
    remember: Bank | None = None,
) -> EMC2:
    """EMC2 (Yau et al. 2024): the global loss through a Markov chain per instance; call with ``ids``.

    With ``proposals="batch"`` they come from the batch and the chain's own state, which keeps the softmax over the data
    set; ``proposals="data set"`` is Algorithm 1 as printed. States are rescored where an embedding is available, as the
    paper states and its code does not. The value is a surrogate.

    Args:
        num_instances: Size of the data set.
        temperature: Divides the similarities.
        burn_in: Share of the steps that are not counted.
        proposals: "batch" or "data set".
        remember: A bank of embeddings, so that states outside the batch receive a gradient.
    """
    return EMC2(num_instances, temperature, burn_in, proposals=proposals, remember=remember)


def instance_discrimination(
    num_instances: int,
    dim: int,
    num_draws: int = INSTANCE_DRAWS,
    temperature: float = BANK_TEMPERATURE,
    momentum: float = 0.5,
) -> InstanceDiscrimination:
    """Instance discrimination (Wu et al. 2018): binary NCE against a bank of all instances, which the loss keeps.

    Call it as ``loss(z, ids)``. The arguments are those of ``InstanceDiscrimination``.
    """
    return InstanceDiscrimination(num_instances, dim, num_draws, temperature, momentum)


def instance_discrimination_softmax(
    num_instances: int,
    dim: int,
    num_draws: int = INSTANCE_DRAWS,
    temperature: float = BANK_TEMPERATURE,
    momentum: float = 0.5,
) -> InstanceDiscrimination:
    """Instance discrimination as in Ring (Wu et al. 2021, eq. 3): a softmax over the own entry and the draws.

    Without the constant log(num_draws + 1); the own entry is never among the draws.
    """
    return InstanceDiscrimination(num_instances, dim, num_draws, temperature, momentum, objective="softmax")


def cmc(
    num_instances: int,
    dim: int,
    num_draws: int = CMC_DRAWS,
    temperature: float = BANK_TEMPERATURE,
    momentum: float = 0.5,
) -> CMC:
    """CMC with two views (Tian et al. 2019): each view against the bank of the other view.

    Call it as ``loss(z1, z2, ids)``. The arguments are those of ``CMC``.
    """
    return CMC(num_instances, dim, num_draws, temperature, momentum)


def local_aggregation(
    temperature: float = BANK_TEMPERATURE,
    num_background: int = 4096,
    *,
    background: Negatives | None = None,
    pooling: str = "sum",
) -> Loss:
    """Local Aggregation (Zhuang et al. 2019): pull towards the entries of the anchor's clusters.

    Call it as ``loss(z, ids, bank, clusters)`` and push z to the bank afterwards. The background are the closest
    entries of the bank, including the anchor's own; those that share a cluster with the anchor are close, and the loss
    is -log(close / background). The authors add 1e-7 inside the logarithm.

    Args:
        temperature: Divides the similarities.
        num_background: Number of closest entries in the background.
        background: Another distribution for the background.
        pooling: ``"sum"`` (the authors' code), or ``"mean"``: both sums divided by their sizes (eq. 5 of Ring),
            which adds a constant to the loss of each anchor.
    """
    around = Rank(0, num_background) if background is None else background

    def loss(z: View, ids: Tensor, bank: Bank, clusters: Clusters) -> Tensor:
        # No ids on the anchors: the own entry is a candidate here.
        anchors = Keys(z, clusters=clusters.of(ids))
        scores = score(anchors, bank.of(ids).vectors, clusters.tag(bank.keys()), temperature)
        log_w = around.log_weights(scores)
        close = scores.same_cluster("local_aggregation") & (log_w != NEVER)
        return reduce(neighbour_nce(scores, log_w, close, own=False, pooling=pooling), scores)

    return loss


def ring_neighbours(
    temperature: float = 0.07,
    inner: float = 0.1,
    outer: float = 1.0,
    dynamic_inner: bool = True,
    pooling: str = "sum",
) -> Loss:
    """Ring with neighbours as extra positives (Wu et al. 2021): candidates closer than the ring join the positive.

    With ``clusters`` at the call, the pool's members of the anchor's cluster join it instead (Ring + C_i).

    Args:
        temperature: Divides the similarities.
        inner: Inner edge of the ring, see ``Ring``.
        outer: Outer edge of the ring, see ``Ring``.
        dynamic_inner: Whether ``inner`` is a fraction of the outer set.
        pooling: How the numerator is pooled: "sum", or "geometric" (the authors' ``logsumexp_inner=False``).
    """
    ring, ball = Ring(inner, outer, dynamic_inner), Ring(0.0, outer)

    def loss(q: View, k: View, pool: Pools, ids: Tensor | None = None, clusters: Clusters | None = None) -> Tensor:
        tags = None if clusters is None or ids is None else clusters.of(ids)
        scores = score(Keys(q, ids, clusters=tags), k.detach(), pool, temperature)
        log_w = ring.log_weights(scores)
        if clusters is None:
            close = (ball.log_weights(scores) != NEVER) & (log_w == NEVER)
        else:
            close = scores.same_cluster("ring_neighbours") & scores.valid
        return reduce(neighbour_nce(scores, log_w, close, pooling=pooling), scores)

    return loss


def negative_cache(temperature: float = BANK_TEMPERATURE, num_draws: int = 1, how: str = "gumbel") -> Loss:
    """The negative cache (Lindgren et al. 2021): negatives drawn by stale scores and encoded afresh.

    Call it as ``loss(q, k, cache, encode, ids)``, where ``encode(ids)`` returns vectors with a gradient. Push and
    refresh the cache afterwards.

    Args:
        temperature: Divides the similarities.
        num_draws: Negatives per anchor.
        how: "gumbel" (drawn from the softmax) or "top" (the highest scores).
    """

    def loss(q: View, k: View, cache: Cache, encode: EncodeRows, ids: Tensor | None = None) -> Tensor:
        return cache_loss(Keys(q, ids), k, cache, encode, temperature, k=num_draws, how=how).losses.mean()

    return loss


def _pooled(negatives: Negatives, temperature: float) -> ContrastiveLoss:
    return ContrastiveLoss(
        negatives, temperature, positives="label", num_negatives="candidates", reduction="pairs", normalize=False
    )


def _against_pool(negatives: Negatives, temperature: float, **options: Any) -> ContrastiveLoss:
    return ContrastiveLoss(negatives, temperature, views="pool", normalize=False, detach_keys=True, **options)
