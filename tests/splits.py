"""The loss of an algorithm file as the training loop calls it, and that it does not matter how a mini-batch is cut."""

import random

import torch

NAN = float("nan")


def token_columns(n, seed=0):
    """The columns that every algorithm has, of n rows, the third without any token; masked cells hold NaN.

    Returns rng, cells(mean, deviation) for more of them, out (logp, entropy) and batch (mask, logp_old, logp_ref).
    """
    rng = random.Random(seed)
    lengths = [0 if i == 2 else rng.randint(1, 7) for i in range(n)]
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]

    def cells(mean, scale):
        x = [[rng.gauss(mean, scale) for _ in range(8)] for _ in range(n)]
        return torch.where(mask, torch.tensor(x, dtype=torch.float64), NAN)

    old = cells(-1, 0.5)
    out = {"logp": old + cells(0, 0.6), "entropy": cells(1, 0.2)}
    return rng, cells, out, dict(mask=mask, logp_old=old, logp_ref=out["logp"] + cells(0, 0.4))


def run_loss(algo, out, batch, cfg, chunks, wrt):
    """Sums over all chunks first, then one share of the loss per chunk.

    chunks: slices of rows; wrt: names in `out` -> the loss, its gradients (a tuple), {metric: (sum, count)} of each chunk.
    """
    out = {name: x.clone().requires_grad_(name in wrt) for name, x in out.items()}
    parts = [{name: x[rows] for name, x in batch.items()} for rows in chunks]
    pre = sum(algo.pre_update(out["logp"][rows], part, cfg) for rows, part in zip(chunks, parts))
    assert not pre.requires_grad
    counts = [algo.denominators(part, cfg) for part in parts]
    denom = {name: sum(c[name] for c in counts) for name in counts[0]}
    results = [
        algo.loss({name: x[rows] for name, x in out.items()}, part, cfg, pre=pre, denom=denom) for rows, part in zip(chunks, parts)
    ]
    assert all(scalar.shape == () for scalar, _ in results)
    total = sum(scalar for scalar, _ in results)
    grads = torch.autograd.grad(total, [out[name] for name in wrt], allow_unused=True, materialize_grads=True)
    return total.detach(), grads, [metrics for _, metrics in results]


def check_splits(algo, out, batch, cfg, wrt):
    """One chunk, four uneven ones (one holds only the third row, which the caller leaves without tokens), and with filler rows: the
    loss, its gradients and the sums of all metrics are equal."""

    def close(actual, expected):
        assert torch.allclose(*(torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected)), rtol=1e-12, atol=1e-12)

    n = len(batch["mask"])
    whole, grads, (metrics,) = run_loss(algo, out, batch, cfg, [slice(None)], wrt)
    assert not batch["mask"][2].any() and all(torch.isfinite(g).all() and (g != 0).any() for g in grads)
    chunks = [slice(0, 2), slice(2, 3), slice(3, 6), slice(6, n)]
    filler = {name: torch.cat([x, torch.full_like(x[:2], False if x.dtype == torch.bool else NAN)]) for name, x in batch.items()}
    filler_out = {name: torch.cat([x, torch.full_like(x[:2], NAN)]) for name, x in out.items()}
    for o, b, c in ((out, batch, chunks), (filler_out, filler, [*chunks, slice(n, n + 2)]), (filler_out, filler, [slice(None)])):
        total, split_grads, split_metrics = run_loss(algo, o, b, cfg, c, wrt)
        close(total, whole)
        for split, once in zip(split_grads, grads, strict=True):
            close(split[:n], once)
            assert (split[n:] == 0).all()
        for name, (value, count) in metrics.items():
            if name.endswith("/max"):
                assert float(max(m[name][0] for m in split_metrics)) == float(value)
            else:
                assert float(sum(m[name][1] for m in split_metrics)) == float(count), f"{name}: counts do not add up"
                close(sum(float(m[name][0]) for m in split_metrics), float(value))
