"""CAPO-action once more, as slow plain-Python loops over floats: no tensor, no mask, no padding.

Ragged input: a row is the list of its response tokens only, so nothing here can be wrong about masks. Derivatives are
worked out by hand. `tests/test_capo_action.py` compares the module with this file; neither imports the other's code.
"""

import math

CLAMP = 20.0  # every log-ratio is kept in [-20, 20] before exp


def clip(x, low, high):
    return max(low, min(x, high))


def gae(rewards, values, traj, step, gamma, lam, bootstrap=None):
    """Advantages and returns of each row, rows in any order: the double sum of the definition."""
    bootstrap = bootstrap or {}
    advantages, returns = [], []
    for i in range(len(rewards)):
        total = 0.0
        for j in range(len(rewards)):
            if traj[j] != traj[i] or step[j] < step[i]:
                continue
            following = [k for k in range(len(rewards)) if traj[k] == traj[j] and step[k] == step[j] + 1]
            v_next = values[following[0]] if following else bootstrap.get(traj[j], 0.0)
            delta = rewards[j] + gamma * v_next - values[j]
            total += (gamma * lam) ** (step[j] - step[i]) * delta
        advantages.append(total)
        returns.append(total + values[i])
    return advantages, returns


def whiten(x):
    """(x - mean) / (sample std + 1e-8); zeros for fewer than two entries and for a tie."""
    if len(x) < 2 or max(x) - min(x) <= 1e-12 * max(1.0, max(abs(v) for v in x)):
        return [0.0 for _ in x]
    mean = math.fsum(x) / len(x)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in x) / (len(x) - 1))
    return [(v - mean) / (std + 1e-8) for v in x]


def center(z):
    """Token-weighted mean of all log-ratios of the mini-batch; 0 without any token."""
    flat = [v for row in z for v in row]
    return math.fsum(flat) / len(flat) if flat else 0.0


def log_ratio_of_action(row, mu, alpha, kind):
    """(log w before the clamp, its derivative by each token's log-ratio) of one row with at least one token."""
    n = len(row)
    if kind == "action":
        return mu + n**-alpha * math.fsum(v - mu for v in row), n**-alpha
    if kind == "sqrt":
        return math.fsum(row) / math.sqrt(n), 1 / math.sqrt(n)
    if kind == "mean":
        return math.fsum(row) / n, 1 / n
    if kind == "product":
        return math.fsum(row), 1.0
    raise ValueError(kind)


def ratio(row, mu, alpha=0.5, kind="action"):
    return math.exp(clip(log_ratio_of_action(row, mu, alpha, kind)[0], -CLAMP, CLAMP))


def policy(z, advantages, mu, eps=1e-3, alpha=0.5, kind="action"):
    """Per row: loss, whether the clip decides it, and d loss / d z of each of its tokens (mu held fixed)."""
    losses, active, grads = [], [], []
    for row, a in zip(z, advantages):
        if not row:
            losses.append(0.0)
            active.append(False)
            grads.append([])
            continue
        log_w, slope = log_ratio_of_action(row, mu, alpha, kind)
        w = math.exp(clip(log_w, -CLAMP, CLAMP))
        clipped = clip(w, 1 - eps, 1 + eps)
        losses.append(-min(w * a, clipped * a))
        active.append(clipped * a < w * a)
        moves = not active[-1] and abs(log_w) < CLAMP
        grads.append([-a * w * slope if moves else 0.0 for _ in row])
    return losses, active, grads


def token_gae(rewards, values, traj, step, gamma=0.99, lam=1.0, bootstrap=None):
    """GAE over each trajectory's response tokens in order, observations left out; a row's reward is on its last token.

    values: one list per row. A row without tokens must have reward 0 here. bootstrap: {trajectory: value after its last token}."""
    advantages = [[0.0] * len(row) for row in values]
    returns = [[0.0] * len(row) for row in values]
    for name in set(traj):
        rows = sorted((i for i in range(len(traj)) if traj[i] == name), key=lambda i: step[i])
        chain = [(i, k) for i in rows for k in range(len(values[i]))]
        for start in range(len(chain)):
            total = 0.0
            for at in range(start, len(chain)):
                i, k = chain[at]
                r = rewards[i] if k == len(values[i]) - 1 else 0.0
                v_next = values[chain[at + 1][0]][chain[at + 1][1]] if at + 1 < len(chain) else (bootstrap or {}).get(name, 0.0)
                total += (gamma * lam) ** (at - start) * (r + gamma * v_next - values[i][k])
            i, k = chain[start]
            advantages[i][k] = total
            returns[i][k] = total + values[i][k]
    return advantages, returns


def token(z, a, eps=0.2, c=3.0):
    """One token of plain PPO with dual clip: (loss, d loss / d z)."""
    rho = math.exp(clip(z, -CLAMP, CLAMP))
    clipped = clip(rho, 1 - eps, 1 + eps)
    plain = min(rho * a, clipped * a)
    value = plain if a >= 0 else max(plain, c * a)
    moves = rho * a <= clipped * a and (a >= 0 or rho * a > c * a) and abs(z) < CLAMP
    return -value, -rho * a if moves else 0.0


def value(v, v_old, target, width=0.5):
    """(value loss of one row, d loss / d v)."""
    near = clip(v, v_old - width, v_old + width)
    plain, clipped = (v - target) ** 2, (near - target) ** 2
    if plain >= clipped:
        return plain / 2, v - target
    return clipped / 2, near - target if near == v else 0.0


def kl(logp, logp_ref):
    """(low-variance KL of one token, d / d logp)."""
    diff = logp_ref - logp
    low = clip(diff, -20.0, 20.0)
    raw = math.exp(low) - low - 1
    return clip(raw, -10.0, 10.0), 1 - math.exp(low) if abs(diff) < 20 and abs(raw) < 10 else 0.0


def total(rows, *, mu, ratio="action", eps=1e-3, alpha=0.5, token_eps=0.2, c=3.0, kl_coef=1e-3, entropy_coef=0.0):
    """Policy loss of a whole mini-batch. rows: dicts of equally long lists logp, logp_old, logp_ref, entropy, and adv,
    one number for action ratios or one per token for ratio=token. A row without tokens is not there."""
    rows = [r for r in rows if r["logp"]]
    z = [[a - b for a, b in zip(r["logp"], r["logp_old"])] for r in rows]
    tokens = sum(len(x) for x in z)
    if ratio == "token":
        terms = [token(x, a, token_eps, c)[0] for row, r in zip(z, rows) for x, a in zip(row, r["adv"])]
    else:
        terms = policy(z, [r["adv"] for r in rows], mu, eps, alpha, ratio)[0]
    penalty = sum(kl(a, b)[0] for r in rows for a, b in zip(r["logp"], r["logp_ref"]))
    entropy = sum(sum(r["entropy"]) for r in rows)
    return sum(terms) / len(terms) + (kl_coef * penalty - entropy_coef * entropy) / tokens
