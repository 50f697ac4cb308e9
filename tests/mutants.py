"""Does the suite notice a wrong line? `python tests/mutants.py [capo_action.py ...]` (default: every file of the table)

Each entry is one wrong edit of an algorithm file: (what it breaks, exact text, replacement). It is applied to a copy of
the file in a temporary folder with that file's tests beside it; the tests must fail there ("killed"). Exit code 1 if a
mutant survives, if its text is not found exactly once (stale), or if a function that holds an `Eq.` mark has none.
To cover another algorithm file, add its name and edits to MUTANTS; its tests are tests/test_<name>.py and what they import.
"""

import ast
import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: two mutants run at a time

import hypothesis  # noqa: E402, F401
import numpy  # noqa: E402, F401
import pytest  # noqa: E402
import torch  # noqa: E402, F401

ROOT = Path(__file__).resolve().parent.parent

MUTANTS = {
    "capo_action.py": [
        # credit
        ("delta without its discount", "+ gamma * next_value - float(values[n])", "+ next_value - float(values[n])"),
        ("delta with the value's sign turned", "next_value - float(values[n])  # Eq.", "next_value + float(values[n])  # Eq."),
        ("GAE without lambda", "gamma * lam * next_advantage  # Eq.", "gamma * next_advantage  # Eq."),
        ("value one action off", "next_value = float(values[n])\n", "next_value = float(values[n - 1])\n"),
        ("steps walked forwards", "reversed(rows):\n            delta", "rows:\n            delta"),
        (
            "credit leaks into the next episode",
            'float(bootstrap.get(trajectory, 0.0)), 0.0\n',
            'float(bootstrap.get(trajectory, 0.0)), locals().get("next_advantage", 0.0)\n',
        ),
        ("returns lack the value", "= next_advantage\n    return advantages, advantages +", "= next_advantage\n    return advantages, 0 *"),
        ("bootstrap ignored", "float(bootstrap.get(trajectory, 0.0))", "0.0"),
        ("token credit ignores the bootstrap", "float((bootstrap or {}).get(trajectory, 0.0))", "0.0"),
        ("a value target that moves with the critic", "dtype=torch.float64).detach().cpu(), 0.0)", "dtype=torch.float64), 0.0)"),
        ("the discount of the settings is not passed on", "gamma=cfg.gamma", "gamma=0.99"),
        ("nor their lambda", "lam=cfg.lam", "lam=1.0"),
        ("nor their length exponent", "alpha=cfg.alpha", "alpha=0.5"),
        ("nor their clip range of values", "clip=cfg.value_clip", "clip=0.5"),
        ("nor their dual clip", "c=cfg.dual_clip", "c=3.0"),
        ("nor their clip range of tokens", "eps=cfg.token_eps", "eps=0.2"),
        ("nor their clip range of actions", "eps=cfg.eps, **kind", "eps=0.001, **kind"),
        ("reward on every token", "next_value, reward = value, 0.0", "next_value = value"),
        ("an empty reply's reward lost", "reward += float(rewards[n])", "reward = float(rewards[n])"),
        ("token credit ignores the mask", "tokens = mask[n].nonzero().flatten()", "tokens = torch.arange(mask.shape[1])"),
        ("token credit with a shifted mask", "mask[n].nonzero()", "mask[n].roll(1).nonzero()"),
        ("population deviation (ddof 0)", "x.std() + 1e-8", "x.std(correction=0) + 1e-8"),
        ("another floor of the deviation", "x.std() + 1e-8", "x.std() + 1e-6"),
        ("float residue is no tie", "<= 1e-12 *", "< 0 *"),
        ("one row is whitened", "if len(x) < 2 or x.max()", "if x.max()"),
        ("state value read at the last column", "values=value[:, 0]", "values=value[:, -1]"),
        ("whitened over padded cells", "adv[mask] = whiten(adv[mask])", "adv = whiten(adv.flatten()).view_as(adv)"),
        # ratio
        ("mu carries a gradient", "log_ratio.detach(), 0.0).double()", "log_ratio, 0.0).double()"),
        ("mu counts padding", "return z.sum(), mask.sum()", "return z.sum(), torch.tensor(mask.numel())"),
        ("mu counts actions", "return z.sum(), mask.sum()", "return z.sum(), mask.any(1).sum()"),
        ("mu sums masked cells", "z = torch.where(mask, log_ratio.detach(), 0.0)", "z = log_ratio.detach()"),
        ("no length exponent", "length**-alpha * deviation", "deviation"),
        ("deviation with the sign of mu turned", "log_ratio - mu, 0.0", "log_ratio + mu, 0.0"),
        ("ratio without the drift", "log_w = mu + ", "log_w = "),
        ("padded length", "length = mask.sum(1).clamp(min=1).to(", "length = torch.full_like(mask.sum(1), mask.shape[1]).to("),
        ("masked after the arithmetic", "torch.where(mask, log_ratio - mu, 0.0).sum(1)", "((log_ratio - mu) * mask).sum(1)"),
        ("sqrt kind is the mean", '"sqrt": -0.5', '"sqrt": -1.0'),
        ("log-ratio not clamped", "log_w.clamp(-20, 20).exp()", "log_w.exp()"),
        # loss
        ("max for min", "-torch.minimum(unclipped", "-torch.maximum(unclipped"),
        ("sign of the loss", "-torch.minimum(unclipped", "torch.minimum(unclipped"),
        ("upper clip side only", "w.clamp(1 - eps, 1 + eps) * adv\n", "w.clamp(max=1 + eps) * adv\n"),
        ("lower clip side only", "w.clamp(1 - eps, 1 + eps) * adv\n", "w.clamp(min=1 - eps) * adv\n"),
        ("clip flag where it does not act", "real & (clipped < unclipped)", "real & (clipped != unclipped)"),
        ("token loss: max for min", "clipped = torch.minimum(w * advantages", "clipped = torch.maximum(w * advantages"),
        ("token loss: upper clip side only", "w.clamp(1 - eps, 1 + eps) * advantages)", "w.clamp(max=1 + eps) * advantages)"),
        ("dual clip on the wrong side", "torch.where(advantages < 0, torch.max", "torch.where(advantages > 0, torch.max"),
        ("value loss: min for max", "torch.maximum((values", "torch.minimum((values"),
        ("value loss: one clip side", "values_old - clip, values_old + clip", "values_old - clip, torch.inf + values_old"),
        ("value loss without its half", "return 0.5 * torch.maximum", "return torch.maximum"),
        ("KL the other way round", "(logp_ref - logp).clamp", "(logp - logp_ref).clamp"),
        ("KL without the clamp before exp", "(logp_ref - logp).clamp(-20, 20)", "(logp_ref - logp)"),
        ("KL without its bound", "(l.exp() - l - 1).clamp(max=10)", "(l.exp() - l - 1)"),
        # what the training loop calls
        ("rows without tokens count in B", 'batch["mask"].any(1).sum()', 'torch.tensor(len(batch["mask"]))'),
        ("mu of the micro-batch alone", "pre[0] / pre[1].clamp(min=1)", "(z * mask).sum() / mask.sum().clamp(min=1)"),
        ("local denominator: policy", 'per_term.sum() / denom["policy"]', "per_term.sum() / real.sum().clamp(min=1)"),
        ("local denominator: KL", 'kl.sum() / denom["kl"]', "kl.sum() / mask.sum().clamp(min=1)"),
        ("local denominator: value", 'per_row.sum() / denom["value"]', "per_row.sum() / real.sum().clamp(min=1)"),
        ("KL rewarded", "total + cfg.kl_coef * kl.sum()", "total - cfg.kl_coef * kl.sum()"),
        ("KL over masked cells", 'torch.where(mask, batch["logp_ref"], zero)', 'batch["logp_ref"]'),
        ("log-probs of masked cells", "(torch.where(mask, x, zero) for x in", "(x for x in"),
        ("token advantages of masked cells", "adv = torch.where(mask, adv.expand_as(z), 0.0)", "adv = adv.expand_as(z)"),
        ("mean of token advantages over padding", "torch.where(mask, adv, 0.0).sum(1, keepdim=True)", "adv.sum(1, keepdim=True)"),
        ("values of masked cells", "torch.where(real, x.expand(real.shape), 0.0)", "x.expand(real.shape)"),
        ("entropy punished", "total - cfg.entropy_coef", "total + cfg.entropy_coef"),
        ("values of rows without tokens", 'else batch["mask"].any(1, keepdim=True)', 'else torch.ones_like(batch["mask"][:, :1])'),
    ],
    "ccpo_context.py": [
        # features
        ("bins rounded up", "np.floor(bins * np.clip", "np.ceil(bins * np.clip"),
        ("every step is a revisit", "revisit.append(o in seen)\n        seen.add(o)", "seen.add(o)\n        revisit.append(o in seen)"),
        ("hidden states not centred", "        h = h - h.mean(0)", "        pass"),
        ("the trailing directions removed", "(h.T @ h)[1][:, -3:]", "(h.T @ h)[1][:, :3]"),
        ("three steps projected", "if n > 3:", "if n > 2:"),
        ("rounding taken for a feature", "h * (_norms(h) > 1e-9 * largest)", "h * (_norms(h) > 0)"),
        ("summary not of unit length", "summary_weight * _unit(_numbers(summary, 2))", "summary_weight * _numbers(summary, 2)"),
        ("the first row's hidden state shared", "sorted(range(len(keys)), key=lambda n: (traj[n], step[n])):", "range(len(keys)):"),
        # peers
        ("same observation of any task", "for same_task in _groups(task):", "for same_task in _groups(task * 0):"),
        ("own steps are peers", "!= traj[bucket]) | (not exclude_self)", "!= traj[bucket]) | True"),
        ("mean for median", "np.median(pairs)", "np.mean(pairs)"),
        ("bandwidth without pairs of a trajectory", "np.triu_indices(len(phi), 1)", "traj[bucket][:, None] != traj[bucket]"),
        ("bandwidth without its floor", "(median if median > 1e-9 else 1.0)", "(median or 1.0)"),
        ("cosine not clipped", "np.maximum(phi[rows] @ phi.T, 0.0)", "phi[rows] @ phi.T"),
        ("nearest may be oneself", "np.where(peer, distance, np.inf)[unlike]", "distance[unlike]"),
        ("weights not restricted to peers", "return np.where(peer, weights, 0.0), tau", "return weights, tau"),
        ("readout not normalised", "weights @ values / np.maximum(weights.sum(1), 1e-12)", "weights @ values"),
        ("readout without its floor", "np.maximum(weights.sum(1), 1e-12)", "np.maximum(weights.sum(1), 1e-30)"),
        ("float noise between equal rows", "np.triu(distance < 1e-6, 1)", "np.triu(distance < 0, 1)"),
        # credit
        ("rewards to go without discount", "to_go[i, t] = r + gamma * to_go", "to_go[i, t] = r + to_go"),
        ("Y one discount off", "gamma ** (length - 1 - step) * outcome if", "gamma ** (length - step) * outcome if"),
        ("penalty rewarded", "return to_go - eta * invalid", "return to_go + eta * invalid"),
        ("Z one discount off", "return gamma ** (length - step) * outcome", "return gamma ** (length - 1 - step) * outcome"),
        ("baseline with the sign turned", "return target - baseline", "return target + baseline"),
        ("looks one step less ahead", "inside = step + k_future < length", "inside = step + k_future < length - 1"),
        ("value of the same step", "+ np.where(inside, k_future, 0)", "+ np.where(inside, 0, 0)"),
        ("future over the whole batch", "in _groups(task):\n        steps = steps", "in [np.arange(len(task))]:\n        steps = steps"),
        ("undefined changes enter the statistics", "steps[~np.isnan(delta_value[steps])]", "steps"),
        ("gain not discounted", "return gamma**h * later - value", "return later - value"),
        ("channels not centred", "(credit - credit.mean()) / (total", "credit / (total"),
        ("each channel over its own deviation", "/ (total.std(ddof=1) + 1e-6)", "/ (credit.std(ddof=1) + 1e-6)"),
        ("channels: population deviation (ddof 0)", "/ (total.std(ddof=1)", "/ (total.std(ddof=0)"),
        ("unsupported rows enter the statistics", "rows = rows[supported[rows]]", "rows = rows[supported[rows] | True]"),
        ("normalised over the batch", "task=task[copies], normalize", "task=task[copies] * 0, normalize"),
        ("V expects Y", "readout(weights, z[bucket])", "readout(weights, y[bucket])"),
        ("float residue is no tie", "<= 1e-12 * max(1.0", "< 0 * max(1.0"),
        ("population deviation (ddof 0)", "(x.std(ddof=1) + 1e-6 if divide", "(x.std(ddof=0) + 1e-6 if divide"),
        ("episode score without the penalty", "_numbers(outcome, 1) - eta * _numbers(invalid, 1)", "_numbers(outcome, 1)"),
        ("episode advantage always added", "return contextual + alpha_ep * episode", "return contextual + episode"),
        ("copies may disagree", "again = np.flatnonzero(first[copies] != np.arange(len(copies)))", "again = np.zeros(0, int)"),
        ("NaN gets in", "~np.isfinite(flat).all(1)", "np.zeros(len(flat), bool)"),
        ("any outcome will do", 'for name in ("task", "outcome"):', 'for name in ("task",):'),
        # loss
        ("max for min", "clipped = torch.minimum(w * advantages", "clipped = torch.maximum(w * advantages"),
        ("upper clip side only", "w.clamp(1 - eps, 1 + eps) * advantages)", "w.clamp(max=1 + eps) * advantages)"),
        ("lower clip side only", "w.clamp(1 - eps, 1 + eps) * advantages)", "w.clamp(min=1 - eps) * advantages)"),
        ("dual clip on the wrong side", "torch.where(advantages < 0, torch.max", "torch.where(advantages > 0, torch.max"),
        ("no dual clip", "torch.maximum(clipped, c * advantages), clipped)", "clipped, clipped)"),
        ("log-ratio not clamped", "log_w.clamp(-20, 20).exp()", "log_w.exp()"),
        ("KL the other way round", "(logp_ref - logp).clamp", "(logp - logp_ref).clamp"),
        ("KL without the clamp before exp", "(logp_ref - logp).clamp(-20, 20)", "(logp_ref - logp)"),
        ("prompts do not share", 'if "prompt_ids" in batch else', 'if "prompts" in batch else'),
        ("local denominator: policy", 'per_token.sum() / denom["policy"]', "per_token.sum() / mask.sum().clamp(min=1)"),
        ("local denominator: KL", 'kl.sum() / denom["kl"]', "kl.sum() / tokens.clamp(min=1)"),
        ("KL over masked cells", 'torch.where(mask, batch["logp_ref"], zero)', 'batch["logp_ref"]'),
        ("shifted mask", 'adv = torch.where(mask, batch["adv"]', 'adv = torch.where(mask.roll(1, 1), batch["adv"]'),
        ("credit of rows without tokens counted", "batch[name][real].abs().sum()", "batch[name].abs().sum()"),
    ],
    "capo_critique.py": [
        # steps
        ("one newline cuts", 'finditer(r"\\n{2,}", text)', 'finditer(r"\\n+", text)'),
        ("two newlines alone cut", 'r"\\n{2,}"', 'r"(?<!\\n)\\n\\n(?!\\n)"'),
        ("separator belongs to the next step", "blank.end() for blank", "blank.start() for blank"),
        ("white space is a step", "if text[start:end].strip()]", "if text[start:end]]"),
        ("leading space is in no step", "pairwise([0, *starts[1:], len(text)])", "pairwise([*(starts or [0]), len(text)])"),
        ("the last step is cut short", "*starts[1:], len(text)]", "*starts[1:], len(text.rstrip())]"),
        ("token in the step of its end", "for start, _ in offsets]", "for _, start in offsets]"),
        ("step one too early at its first character", "bisect_right(starts, start)", "bisect_right(starts, start - 1)"),
        ("steps from 0", "[bisect_right(starts, start) for", "[bisect_right(starts, start) - 1 for"),
        ("offsets by length of the decoded prefix", "len(commonprefix([new, text[start : start + len(new)]]))", "len(new)"),
        ("first token decoded alone", "near, start = max(whole - 8, 0)", "near, start = whole"),
        ("all tokens decoded again", "near, start = max(whole - 8, 0)", "near, start = 0"),
        ("window moves into a character", "whole = k if ends[k] == start + len(new) else whole", "whole = k"),
        # judge
        ("tags can be forged", 'return text.replace("<", "&lt;")', "return text"),
        ("step tags alone escaped", 'text.replace("<", "&lt;")', 'text.replace("<step", "&lt;step")'),
        ("the answer is not escaped", "{escape(response[start:end].strip())}", "{response[start:end].strip()}"),
        ("the problem is not escaped", "{escape(problem)}", "{problem}"),
        ("the solution is not escaped", "{escape(solution)}", "{solution}"),
        ("steps shown from 0", "enumerate(spans, 1)]", "enumerate(spans)]"),
        ("solution always shown", "solution=solution if cfg.reference_solution else None", "solution=solution"),
        ("one critique per call", "n=cfg.critiques, **sampling", "n=1, **sampling"),
        ("the first pair of tags counts", "closed[-1].strip()", "closed[0].strip()"),
        ("tags in lower case alone", "flags=re.IGNORECASE | re.ASCII", "flags=re.ASCII"),
        ("letters that fold to those of the tag", "flags=re.IGNORECASE | re.ASCII", "flags=re.IGNORECASE"),
        ("any tag closes", '== ("", "/")]', '[:1] == ("",)]'),
        ("full stop not ignored", '.strip().removesuffix(".").lower()', ".strip().lower()"),
        ("all full stops ignored", '.removesuffix(".")', '.replace(".", "")'),
        ("no step is unreadable", 'if items in (["none"], ["n/a"], ["[]"]):', "if False:"),
        (
            "an empty list is a failure",
            "if not all(numbers):\n        return None",
            "if not (numbers and all(numbers)):\n        return None",
        ),
        ("none among numbers", 'if items in (["none"], ', 'if "none" in items or items in (["none"], '),
        ("commas alone separate", 're.split(r"[,\\s]+", listed)', 're.split(r",\\s*", listed)'),
        ("step 3 is two items", 're.sub(r"step\\s+(?=[+-]?\\d)", "step_", ', "("),
        ("signs unreadable", "([+-]?[0-9]+)", "([0-9]+)"),
        ("digits of any script", "([+-]?[0-9]+)", "([+-]?\\d+)"),
        ("unreadable items skipped", "if not all(numbers):\n        return None\n    numbers = {", "numbers = {"),
        ("unreadable means clean", "if not all(numbers):\n        return None", "if not all(numbers):\n        return set()"),
        ("leading zeros are other numbers", 'number[1].lstrip("+0")', 'number[1].lstrip("+")'),
        ("the last step never wrong", "for s in range(1, n_steps + 1) if str(s)", "for s in range(1, n_steps) if str(s)"),
        # votes
        ("intersection of all but one", "float(count == k)", "float(count >= k - 1)"),
        ("majority is strict", "float(2 * count >= k)", "float(2 * count > k)"),
        ("majority_strict is not", "float(2 * count > k)", "float(2 * count >= k)"),
        ("union needs two", '"union": lambda count, k: float(count >= 1)', '"union": lambda count, k: float(count >= 2)'),
        ("average of counts", "lambda count, k: count / k", "lambda count, k: float(count)"),
        ("greedy takes the last critique", '[: 1 if rule == "greedy" else None]', '[-1 if rule == "greedy" else None :]'),
        ("greedy takes all", '[: 1 if rule == "greedy" else None]', ""),
        ("steps without weight listed", "for s, weight in weights.items() if weight > 0}", "for s, weight in weights.items()}"),
        (
            "unknown vote is a union",
            'if rule not in VOTES:\n        raise',
            'if rule not in VOTES:\n        rule = "union"\n    if False:\n        raise',
        ),
        ("failed critiques count as clean", "usable = [s for s in steps if s is not None]", "usable = [s or set() for s in steps]"),
        ("weights of any size", "and 0 <= weight <= 1)", "and (0 <= weight or weight != weight))"),
        ("weights above 1", "and 0 <= weight <= 1)", "and 0 <= weight)"),
        ("weights of steps that do not exist", "s in range(1, n_steps + 1) and 0", "0"),
        # credit
        ("penalty rewarded", "* C - P * step_weight", "* C + P * step_weight"),
        ("penalty without its weight", "P * step_weight.get(s, 0.0)", "P * (s in step_weight)"),
        ("outcome without its weight", "float(correct) * C - P", "float(correct) - P"),
        ("unlisted steps are wrong", "P * step_weight.get(s, 0.0)", "P * step_weight.get(s, 1.0)"),
        ("no format reward", "step_weight.get(s, 0.0) + format_reward", "step_weight.get(s, 0.0)"),
        ("format reward for all", "format_reward=cfg.format_reward * good", "format_reward=cfg.format_reward"),
        ("right without a box", "token_rewards(correct and good, ", "token_rewards(correct, "),
        ("an earlier box will do", 'response.rpartition("\\\\boxed{")', 'response.partition("\\\\boxed{")'),
        ("escaped braces count", 're.finditer(r"\\\\.|[{}]"', 're.finditer(r"[{}]"'),
        ("the first brace closes the box", '{"{": 1, "}": -1}', '{"}": -1}'),
        ("a cut answer is well formed", "bool(finished and found and", "bool(found and"),
        ("no box is needed", "bool(finished and found and", "bool(finished and"),
        ("an empty box is well formed", "inside[: brace.start()].strip())", "inside)"),
        ("population deviation (ddof 0)", "x.std(ddof=1) + 1e-6", "x.std(ddof=0) + 1e-6"),
        ("another floor of the deviation", "x.std(ddof=1) + 1e-6", "x.std(ddof=1) + 1e-8"),
        ("not centred", "(x - x.mean()) / (x.std", "x / (x.std"),
        ("float residue is no tie", "<= 1e-12 *", "< 0 *"),
        ("a group without tokens fails", "tied = not len(x) or x.max()", "tied = x.max()"),
        ("pooled over the batch", "rows_of.setdefault(g, [])", "rows_of.setdefault(0, [])"),
        ("each rollout by itself", "rows_of.setdefault(g, [])", "rows_of.setdefault(n, [])"),
        ("shifted mask", "masked_scatter(mask, ", "masked_scatter(mask.roll(1, 1), "),
        ("any verifier will do", "if correct not in (0, 1):", "if correct is ...:"),
        ("any number of offsets", "if len(offsets) != row.sum():", "if False:"),
        ("inverted weights allowed", "if self.C <= self.P and not self.allow_inverted:", "if False:"),
        ("C = P allowed", "if self.C <= self.P and", "if self.C < self.P and"),
        # loss
        ("max for min", "-torch.minimum(w * advantages", "-torch.maximum(w * advantages"),
        ("sign of the loss", "return -torch.minimum(w", "return torch.minimum(w"),
        ("upper clip side only", "w.clamp(1 - eps, 1 + eps) * advantages)", "w.clamp(max=1 + eps) * advantages)"),
        ("lower clip side only", "w.clamp(1 - eps, 1 + eps) * advantages)", "w.clamp(min=1 - eps) * advantages)"),
        ("log-ratio not clamped", "log_w.clamp(-20, 20).exp()", "log_w.exp()"),
        ("clip range not passed on", "adv, eps=cfg.eps), _exp", "adv), _exp"),
        ("KL the other way round", "(logp_ref - logp).clamp", "(logp - logp_ref).clamp"),
        ("KL without the clamp before exp", "(logp_ref - logp).clamp(-20, 20)", "(logp_ref - logp)"),
        ("KL without its bound", "(l.exp() - l - 1).clamp(max=10)", "(l.exp() - l - 1)"),
        ("KL rewarded", "total + cfg.kl_coef * kl.sum()", "total - cfg.kl_coef * kl.sum()"),
        ("local denominator: policy", 'per_token.sum() / denom["policy"]', "per_token.sum() / mask.sum().clamp(min=1)"),
        ("local denominator: KL", 'kl.sum() / denom["kl"]', "kl.sum() / tokens.clamp(min=1)"),
        ("mean over rows", 'tokens = batch["mask"].sum()\n    return', 'tokens = batch["mask"].any(1).sum()\n    return'),
        ("KL over masked cells", 'torch.where(mask, batch["logp_ref"], zero)', 'batch["logp_ref"]'),
        ("masked cells enter the loss", "(torch.where(mask, x, zero) for x in columns)", "(x for x in columns)"),
        ("rows without tokens count as tied", "(real & (adv == 0).all(1)).sum()", "(adv == 0).all(1).sum()"),
        ("one failed critique is all of them", "(failed == 1).sum()", "(failed > 0).sum()"),
    ],
}  # fmt: skip


def marked_functions(source):
    """[(name, first character, past the last)] of the top-level functions whose text holds an `Eq.` mark."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    spans = [(f.name, starts[f.lineno - 1], starts[f.end_lineno]) for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)]
    return [(name, a, b) for name, a, b in spans if "Eq. " in source[a:b]]


def complaints(file, source):
    """What is wrong with the table itself: stale edits, functions with an equation and no mutant."""
    found = []
    for what, old, new in MUTANTS[file]:
        if source.count(old) != 1 or old == new:
            found.append(f"stale: {what!r}: its text occurs {source.count(old)} times, not once: {old!r}")
    places = [source.find(old) for _, old, _ in MUTANTS[file]]
    for name, a, b in marked_functions(source):
        if not any(a <= place < b for place in places):
            found.append(f"{name} holds an equation and has no mutant")
    return found


def run_tests(job):
    """(exit code of pytest, its output) for one file's tests against a changed source, in a process of its own."""
    file, source = job
    name = file.removesuffix(".py")
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder, "tests")
        tests.mkdir()
        Path(folder, file).write_text(source)
        for path in [*ROOT.glob(f"tests/*{name}.py"), ROOT / "tests/splits.py"]:
            shutil.copy(path, tests)
        if (ROOT / "tests/vectors").is_dir():
            shutil.copytree(ROOT / "tests/vectors", tests / "vectors")
        os.chdir(folder)
        sys.path[0] = folder  # in place of the folder of this script
        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(300)
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--rootdir", folder, f"tests/test_{name}.py"])
        signal.alarm(0)
        os.chdir(ROOT)
        return int(code), output.getvalue()


def too_long(*_):
    raise TimeoutError("the tests take longer than 300 s")


def check(file):
    """Number of faults: survivors and stale edits of one algorithm file."""
    source = (ROOT / file).read_text()
    faults = complaints(file, source)
    for line in faults:
        print(f"  {line}")
    if faults:
        return len(faults)
    edits = [("the file as it is", "", ""), *MUTANTS[file]]
    jobs = [(file, source.replace(old, new) if old else source) for _, old, new in edits]
    bad = 0
    # Forked from here, after the imports above: a mutant costs its tests alone. One process per mutant, two at a time.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        for (what, old, _), (code, output) in zip(edits, pool.imap(run_tests, jobs), strict=True):
            if not old:
                if code != 0:
                    print(f"  the unchanged file fails its own tests, so nothing can be said:\n{output[-3000:]}")
                    return 1
                continue
            verdict = {0: "SURVIVED", 1: "killed"}.get(code, f"BROKEN (pytest exit code {code})")
            print(f"  {verdict:9s} {what}", flush=True)
            if code != 1:
                bad += 1
            if code not in (0, 1):
                print(output[-3000:])
    print(f"{file}: {len(MUTANTS[file]) - bad} of {len(MUTANTS[file])} killed")
    return bad


def main(files):
    unknown = [f for f in files if f not in MUTANTS]
    if unknown:
        sys.exit(f"no mutants for {unknown[0]}; known: {', '.join(MUTANTS)}")
    begin, bad = time.time(), 0
    for file in files or MUTANTS:
        print(file, flush=True)
        bad += check(file)
    print(f"{time.time() - begin:.0f} s")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main([Path(f).name for f in sys.argv[1:]])
