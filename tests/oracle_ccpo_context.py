"""CCPO once more, as slow plain-Python loops over floats; numpy only for the singular vectors of the hidden features.

One readout at a time, each peer looked for among all steps. `tests/test_ccpo_context.py` compares the module with this
file; neither imports the other's code.
"""

import math

import numpy as np

NAN = float("nan")


def clip(x, low, high):
    return max(low, min(x, high))


def mean(x):
    return math.fsum(x) / len(x)


def std(x):
    """Sample standard deviation of two or more numbers."""
    m = mean(x)
    return math.sqrt(math.fsum((v - m) ** 2 for v in x) / (len(x) - 1))


def tied(x):
    return len(x) < 2 or max(x) - min(x) <= 1e-12 * max(1.0, max(abs(v) for v in x))


def centred(x):
    """x - mean; zeros for fewer than two entries and for a tie."""
    if tied(x):
        return [0.0 for _ in x]
    m = mean(x)
    return [v - m for v in x]


def zscore(x):
    """(x - mean) / (sample std + 1e-6); zeros for fewer than two entries and for a tie."""
    return [v / (std(x) + 1e-6) if not tied(x) else 0.0 for v in centred(x)]


def median(x):
    x = sorted(x)
    half = len(x) // 2
    return x[half] if len(x) % 2 else (x[half - 1] + x[half]) / 2


def unit(v):
    """nu: v over its length, the length being at least 1e-9."""
    length = max(math.sqrt(math.fsum(a * a for a in v)), 1e-9)
    return [a / length for a in v]


def dot(u, v):
    return math.fsum(a * b for a, b in zip(u, v))


def distance(u, v):
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(u, v)))


def thermometer(value, bound, bins=12):
    """The first floor(bins * value / bound) of the bins are 1."""
    lit = math.floor(bins * clip(value / bound, 0.0, 1.0))
    return [1.0 if k < lit else 0.0 for k in range(bins)]


def context_summary(observations):
    """c of each step of one trajectory: elapsed steps, distinct observations so far, their share, and the revisit bit."""
    rows = []
    for t in range(len(observations)):
        distinct = len(set(observations[: t + 1]))
        revisit = observations[t] in observations[:t]
        rows.append(thermometer(t, 30) + thermometer(distinct, 25) + thermometer(distinct / (t + 1), 1) + [1.0 if revisit else 0.0])
    return rows


def context_features(hidden, summary, summary_weight=1.0):
    """phi of Eq. 9, one per unique step of the whole batch."""
    hidden = [[float(a) for a in h] for h in hidden]
    n = len(hidden)
    if n >= 2:
        middle = [mean([h[k] for h in hidden]) for k in range(len(hidden[0]))]
        hidden = [[a - m for a, m in zip(h, middle)] for h in hidden]
    if n >= 4:
        _, _, directions = np.linalg.svd(np.array(hidden, dtype=np.float64), full_matrices=False)
        for direction in directions[:3].tolist():
            lengths = [dot(h, direction) for h in hidden]
            hidden = [[a - length * b for a, b in zip(h, direction)] for h, length in zip(hidden, lengths)]
    return [unit(unit(h) + [summary_weight * a for a in unit([float(b) for b in c])]) for h, c in zip(hidden, summary)]


def find_peers(query, steps, exclude_self):
    """(peers, bucket, whether the search fell back to the whole task); steps are (task, traj, step, observation)."""
    task, traj, _, obs = query
    whole = [s for s in steps if s[0] == task]
    same = [s for s in whole if s[3] == obs]
    if not exclude_self:
        return same, same, False
    peers = [s for s in same if s[1] != traj]
    if peers:
        return peers, same, False
    return [s for s in whole if s[1] != traj], whole, True


def bandwidth(bucket, phi):
    """tau_B of Eq. 3: 0.15 times the median distance over all pairs of the full bucket."""
    pairs = [distance(phi[bucket[a]], phi[bucket[b]]) for a in range(len(bucket)) for b in range(a + 1, len(bucket))]
    middle = median(pairs) if pairs else 0.0
    return 0.15 * (middle if middle > 1e-9 else 1.0)


def peer_weights(query, peers, phi, tau, kernel):
    """Weight of each peer, not normalised."""
    if kernel == "uniform":
        return [1.0 for _ in peers]
    if kernel == "exp":
        return [math.exp(-distance(phi[query], phi[v]) / tau) for v in peers]
    if kernel != "cosine":
        raise ValueError(kernel)
    weights = [max(dot(phi[query], phi[v]), 0.0) for v in peers]
    if all(w == 0.0 for w in weights):
        gaps = [distance(phi[query], phi[v]) for v in peers]
        nearest = gaps.index(min(gaps))
        weights = [1.0 if k == nearest else 0.0 for k in range(len(peers))]
    return weights


def readout(weights, targets):
    """Eq. 4 for one query with at least one peer."""
    return math.fsum(w * r for w, r in zip(weights, targets)) / max(math.fsum(weights), 1e-12)


def contextual_credit(
    *,
    task,
    traj,
    step,
    obs,
    hidden,
    outcome,
    invalid,
    gamma=0.95,
    eta=0.1,
    k_future=2,
    normalize="task",
    kernel="exp",
    exclude_self=True,
    summary_weight=1.0,
    history_weight=1.0,
    future_weight=1.0,
    env_return=None,
):
    """Lists of one entry per row, rows in any order and with copies. supported: has peers, whatever the weights."""
    if normalize not in ("task", "none"):
        raise ValueError(normalize)
    rows = len(task)

    # Unique steps. A step is (task, traj, step, observation); facts holds what Y and Z are made of.
    step_of_row = [(task[i], traj[i], int(step[i]), obs[i]) for i in range(rows)]
    facts, features, first = {}, {}, {}
    for i, s in enumerate(step_of_row):
        fact = (float(outcome[i]), bool(invalid[i]), None if env_return is None else float(env_return[i]))
        if first.setdefault(s[:3], s) != s or facts.setdefault(s, fact) != fact:
            raise ValueError(f"copies of step {s[:3]} disagree")
        features.setdefault(s, hidden[i])
    steps = sorted(facts, key=lambda s: s[:3])
    length, outcome_of, summary = {}, {}, {}
    for name in {s[1] for s in steps}:
        own = [s for s in steps if s[1] == name]
        if len({s[0] for s in own}) != 1 or len({facts[s][0] for s in own}) != 1 or [s[2] for s in own] != list(range(len(own))):
            raise ValueError(f"trajectory {name} is not one run of steps 0..T-1 with one outcome in one task")
        length[name] = len(own)
        outcome_of[name] = facts[own[0]][0]
        summary.update(zip(own, context_summary([s[3] for s in own])))
    phi = dict(zip(steps, context_features([features[s] for s in steps], [summary[s] for s in steps], summary_weight)))

    # Eq. 1 and the target of Eq. 6
    y, z = {}, {}
    for s in steps:
        left = length[s[1]] - s[2]
        reward, bad, discounted = facts[s]
        if discounted is None:
            discounted = gamma ** (left - 1) * reward
        y[s] = discounted - (eta if bad else 0.0)
        z[s] = gamma**left * reward

    # Eq. 2 to 6
    baseline, value, supported, fallback, tau = {}, {}, {}, {}, {}
    for s in steps:
        peers, bucket, fallback[s] = find_peers(s, steps, exclude_self)
        supported[s] = len(peers) > 0
        baseline[s], value[s], tau[s] = 0.0, 0.0, NAN
        if peers:
            tau[s] = bandwidth(bucket, phi)
            weights = peer_weights(s, peers, phi, tau[s], kernel)
            baseline[s] = readout(weights, [y[v] for v in peers])
            value[s] = readout(weights, [z[v] for v in peers])

    # Eq. 7
    delta = {}
    for s in steps:
        later = min(s[2] + k_future, length[s[1]])
        if later == length[s[1]]:
            known, end = True, outcome_of[s[1]]
        else:
            ahead = [v for v in steps if v[1] == s[1] and v[2] == later][0]
            known, end = supported[ahead], value[ahead]
        delta[s] = end - value[s] if known and supported[s] else NAN
    historical, future = {}, {}
    for name in {s[0] for s in steps}:
        own = [s for s in steps if s[0] == name]
        known = [s for s in own if not math.isnan(delta[s])]
        standard = dict(zip(known, zscore([delta[s] for s in known])))
        for s in own:
            historical[s] = history_weight * (y[s] - baseline[s]) if supported[s] else 0.0
            future[s] = future_weight * standard[s] if s in standard else 0.0

    # Eq. 8 and 11, on the rows as they came
    a_h, a_f, a_cc = [0.0] * rows, [0.0] * rows, [0.0] * rows
    for name in {s[0] for s in steps}:
        support = []
        for i, s in enumerate(step_of_row):
            by_history = history_weight != 0 and supported[s]
            by_future = future_weight != 0 and not math.isnan(delta[s])
            if s[0] == name and (by_history or by_future):
                support.append(i)
        past = [historical[step_of_row[i]] for i in support]
        ahead = [future[step_of_row[i]] for i in support]
        total = [a + b for a, b in zip(past, ahead)]
        if normalize == "none":
            parts = past, ahead, total
        elif tied(total):
            continue
        else:
            spread = std(total) + 1e-6
            parts = [v / spread for v in centred(past)], [v / spread for v in centred(ahead)], zscore(total)
        for i, h, f, both in zip(support, *parts):
            a_h[i], a_f[i], a_cc[i] = h, f, both

    result = {
        "return_target": y,
        "outcome_target": z,
        "baseline": baseline,
        "value": value,
        "supported": supported,
        "fallback": fallback,
        "tau": tau,
        "delta_value": delta,
        "historical": historical,
        "future": future,
    }
    result = {key: [per_step[s] for s in step_of_row] for key, per_step in result.items()}
    return {**result, "a_h": a_h, "a_f": a_f, "a_cc": a_cc}


def episode_advantage(*, task, outcome, invalid, eta=0.1, normalize="zscore"):
    """A_EP of each row: R minus the row's own penalty, against all rows of the task, copies included."""
    scale = {"zscore": zscore, "center": centred}[normalize]
    out = [0.0] * len(task)
    for name in set(task):
        own = [i for i in range(len(task)) if task[i] == name]
        scores = [float(outcome[i]) - (eta if invalid[i] else 0.0) for i in own]
        for i, a in zip(own, scale(scores)):
            out[i] = a
    return out


def dual_clip_loss(log_ratio, advantage, eps=0.2, c=3.0):
    """Loss of one token."""
    rho = math.exp(clip(log_ratio, -20.0, 20.0))
    plain = min(rho * advantage, clip(rho, 1 - eps, 1 + eps) * advantage)
    return -plain if advantage >= 0 else -max(plain, c * advantage)
