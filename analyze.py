"""What credit a run gave, and to what: tables and plots over training, and single episodes as pages to read.

    torchrun --nproc_per_node=2 train.py --algo ccpo_context --log_rows        writes the rows that all of this reads
    python analyze.py runs/RUN                                                 tables and plots, in runs/RUN/analysis
    python analyze.py runs/RUN runs/OTHER                                      and first occurrences, run against run
    python analyze.py runs/RUN --render credit.html --iteration 20 --traj 3    one episode, coloured by its credit

The analyses are those of CCPO's paper (arXiv 2610.19103). What an algorithm does not have is left out, and said.

  iterations      success, steps, revisits; sizes of the advantages; fallbacks and peers per step      one line per iteration
  weights         share of the peers' weights that the history summary changes by more than some points
  actions         credit of a kind of action, relative to what else was done where the same was seen
  first_actions   the step at which a kind of action first occurs, in two runs on the same games

Choices
  - Paper silent: a kind of action is its first word; invalid replies are a kind of their own.
  - Paper silent: a matched group needs two trajectories and two kinds of action; credit is relative to the mean of its rows.
  - Paper silent: each matched group counts once in the mean of a kind, and groups are what the bootstrap draws.
  - Paper silent: Bonferroni's factor is the number of intervals of the table.
  - Paper silent: weights are compared as shares of their query's sum, all pairs of a query and a peer alike.
  - Paper silent: first occurrences are means over a game's trajectories that have the action, and games are paired.
"""

import argparse
import csv
import functools
import html
import json
import os
import re
import string
import sys
import zipfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

import ccpo_context
from envs import UserError, run_script

# --------------------------------------------------------------------------------------------------------------- rows


@functools.cache  # said once in a run
def warn(text: str):
    print(f"warning: {text}", file=sys.stderr, flush=True)


def reply_pieces(decode, ids) -> list[str]:
    """The text of each token; a character of several tokens goes to the last of them. decode: a tuple of ids -> text."""
    pieces, waiting = [], ()
    for token in ids:
        waiting += (int(token),)
        text = decode(waiting)
        whole = not text.endswith("\N{REPLACEMENT CHARACTER}") or len(waiting) == 4  # no character has more bytes
        pieces.append(text if whole else "")
        waiting = () if whole else waiting
    if waiting:
        pieces[-1] = decode(waiting)
    return pieces


def save_rows(path: Path, rows, trajectories, columns: dict, tokenizer):
    """Write an iteration's rows with all that is known of them: `load_rows` reads it back.

    rows, trajectories: as `rollout` makes them; columns: {name: one array per row}, numbers per token or one per row. Of
    `hidden`, rows with one prompt share the state of the first (trajectory, step), in float16. The file is whole or it
    is not there; where it cannot be written, one warning is all that happens.
    """
    order = sorted(range(len(rows)), key=lambda n: (rows[n].traj, rows[n].step))
    rows, of = [rows[n] for n in order], {t.traj: t for t in trajectories}
    played = [of[r.traj] for r in rows]
    decode = functools.cache(lambda ids: tokenizer.decode(list(ids)))  # most calls are for one token, of a few thousand
    pieces = [reply_pieces(decode, r.response_ids) for r in rows]
    stored = {
        "group": np.array([r.group for r in rows], np.int32),
        "traj": np.array([r.traj for r in rows], np.int32),
        "step": np.array([r.step for r in rows], np.int32),
        "reward": np.array([r.reward for r in rows], np.float32),
        "invalid": np.array([r.invalid for r in rows], bool),
        "outcome": np.array([t.outcome for t in played], np.float32),
        "success": np.array([t.success for t in played], bool),
        "truncated": np.array([t.truncated for t in played], bool),
        "failed": np.array(sum(bool(t.failed) for t in trajectories), np.int32),  # trajectories without rows
    }
    texts = {
        "task": [t.task for t in played],
        "kind": [t.kind for t in played],
        "observation": [r.observation for r in rows],
        "action": [r.action for r in rows],
        "problem": [r.info.get("problem", "") for r in rows],
        "reply": ["".join(x) for x in pieces],
    }
    ragged = {name: [np.frombuffer(x.encode("utf-8", "surrogatepass"), np.uint8) for x in column] for name, column in texts.items()}
    ragged["piece"] = [np.array([len(x) for x in row], np.int32) for row in pieces]
    ragged |= {name: [column[n] for n in order] for name, column in columns.items() if name not in ("hidden", "value_old")}
    for name, column in ragged.items():
        stored |= {f"{name}.flat": np.concatenate(column), f"{name}.length": np.array([len(x) for x in column], np.int32)}
    if "hidden" in columns:
        places, shared = {}, []
        for n, row in zip(order, rows, strict=True):
            if places.setdefault(row.prompt_ids.tobytes(), len(places)) == len(shared):
                shared.append(columns["hidden"][n])
        prompt = np.array([places[row.prompt_ids.tobytes()] for row in rows], np.int32)
        stored |= {"hidden": np.array(shared, np.float16), "prompt": prompt}
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.savez_compressed(file, **stored)
        os.replace(temporary, path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        warn(f"{path.parent}: rows are not written ({e.strerror}); training goes on, analyze.py will lack these iterations.")


def load_rows(path: Path) -> dict:
    """{column: one entry per row}, rows sorted by (trajectory, step): arrays (N,) of numbers, lists of texts, `reply` as lists
    of the tokens' texts, `hidden` (N, d), all other columns as lists of arrays, one number per token or one in all; and `failed`,
    a number of trajectories."""
    try:
        with np.load(path) as file:
            stored = dict(file)
    except (zipfile.BadZipFile, EOFError, ValueError) as e:
        raise UserError(f"{path} is damaged ({e}); delete it to go on without this iteration.") from e
    rows = {name: x for name, x in stored.items() if "." not in name}
    for name in (key.removesuffix(".flat") for key in stored if key.endswith(".flat")):
        parts = np.split(stored[f"{name}.flat"], np.cumsum(stored[f"{name}.length"])[:-1])
        is_text = stored[f"{name}.flat"].dtype == np.uint8
        rows[name] = [x.tobytes().decode("utf-8", "surrogatepass") for x in parts] if is_text else parts
    ends = [np.cumsum(x).tolist() for x in rows.pop("piece")]
    rows["reply"] = [[text[a:b] for a, b in zip([0, *e], e)] for text, e in zip(rows["reply"], ends, strict=True)]
    if "hidden" in rows:
        rows["hidden"] = rows["hidden"][rows.pop("prompt")]
    return rows


def row_files(run: Path) -> dict[int, Path]:
    """{iteration: file}, ascending. UserError where there are none."""
    if not (run / "config.json").exists():
        raise UserError(f"{run}: there is no config.json; give the folder of a run.")
    files = {int(p.stem): p for p in sorted((run / "rows").glob("[0-9]*.npz"))}
    if not files:
        raise UserError(f"{run} has no rows to analyse; train with --log_rows.")
    return files


def method_of(run: Path, rows: dict) -> ccpo_context.Config | None:
    """The settings that peers are computed with; None where the algorithm has no peers."""
    return ccpo_context.Config(**json.loads((run / "config.json").read_text())["config"]) if "hidden" in rows else None


# ------------------------------------------------------------------------------------------------------------ analyses


def per_action(column) -> np.ndarray:
    """One number per row, (N,): of a column per token, the mean over the reply."""
    return np.array([x.mean() for x in column], np.float64)


def summaries(rows) -> np.ndarray:
    """CCPO's history summary c of every row, (N, 37); its last entry says whether the observation was seen before."""
    bounds = [0, *(np.flatnonzero(np.diff(rows["traj"])) + 1), len(rows["traj"])]
    return np.concatenate([ccpo_context.context_summary(rows["observation"][a:b]) for a, b in zip(bounds, bounds[1:])])


def play(rows) -> dict:
    """How the iteration's trajectories went. Steps per success: actions of all trajectories over the number of successes."""
    last = np.flatnonzero(np.append(np.diff(rows["traj"]) != 0, True))  # one row of each trajectory
    success = rows["success"][last]
    return {
        "trajectories": len(last),
        "failed": int(rows["failed"]),
        "success": success.mean(),
        "truncated": rows["truncated"][last].mean(),
        "invalid": rows["invalid"].mean(),
        "revisits": summaries(rows)[:, -1].mean(),
        "steps": (rows["step"][last] + 1).mean(),
        "steps_per_success": len(rows["step"]) / success.sum() if success.any() else np.nan,
    }


RATIOS = (("A_F", "A_H"), ("A_CC", "A_EP"))


def credit_sizes(rows) -> dict:
    """Mean sizes over the rows of the advantage and its parts, as far as there are any, and two ratios of them."""
    names = {"adv": "A", "adv_history": "A_H", "adv_future": "A_F", "adv_context": "A_CC", "adv_episode": "A_EP"}
    size = {short: np.abs(per_action(rows[name])).mean() for name, short in names.items() if name in rows}
    ratios = {f"{a}/{b}": size[a] / size[b] if size[b] > 0 else np.nan for a, b in RATIOS if a in size and b in size}
    return {f"abs {name}": x for name, x in size.items()} | ratios


def integers(rows) -> dict:
    """task, traj, obs (N,): what CCPO's functions tell rows apart by."""
    return dict(task=rows["group"], traj=rows["traj"], obs=np.unique(rows["observation"], return_inverse=True)[1])


def peer_counts(rows, cfg) -> dict:
    """Mean number of peers per step, and the share of fallbacks among the steps that have any."""
    peers, fallback = np.zeros(len(rows["traj"])), np.zeros(len(rows["traj"]), bool)
    for queries, bucket, alone in ccpo_context.peer_buckets(**integers(rows), exclude_self=cfg.exclude_self):
        traj, size = np.unique(rows["traj"][bucket], return_counts=True)
        own = size[np.searchsorted(traj, rows["traj"][queries])] if cfg.exclude_self else 0
        peers[queries], fallback[queries] = len(bucket) - own, alone
    return {"peers": peers.mean(), "fallback": fallback[peers > 0].mean() if peers.any() else np.nan}


def peer_shares(rows, cfg, *, summary_weight: float):
    """Yields (queries (q,), bucket (m,), shares (q, m), is_peer (q, m)): the weights of `readout` over their sum.  CCPO, Eq. 4"""
    features = ccpo_context.context_features(rows["hidden"], summaries(rows), summary_weight=summary_weight)
    chosen = dict(traj=rows["traj"], exclude_self=cfg.exclude_self)
    for queries, bucket, _ in ccpo_context.peer_buckets(**integers(rows), exclude_self=cfg.exclude_self):
        weights, _ = ccpo_context.peer_weights(features, queries, bucket, kernel=cfg.kernel, **chosen)
        is_peer = (rows["traj"][queries][:, None] != rows["traj"][bucket]) | (not cfg.exclude_self)
        yield queries, bucket, weights / np.maximum(weights.sum(1, keepdims=True), 1e-12), is_peer


POINTS = (0.25, 0.5, 1, 5, 10)  # percentage points


def weight_changes(rows, cfg) -> dict:
    """Pairs of a query and a peer, and the share of them whose weight the history summary changes by more than each of POINTS."""
    # Paper silent: weights are compared as shares of their query's sum, all pairs of a query and a peer alike.
    pairs = zip(peer_shares(rows, cfg, summary_weight=cfg.summary_weight or 1.0), peer_shares(rows, cfg, summary_weight=0.0), strict=True)
    change = np.concatenate([100 * np.abs(share - without)[peer] for (*_, share, peer), (*_, without, _) in pairs] or [np.zeros(0)])
    return {"pairs": len(change)} | {f"> {p}": (change > p).mean() if len(change) else np.nan for p in POINTS}


def action_kinds(rows) -> list[str]:
    """go, take, open, ... of every row."""
    # Paper silent: a kind of action is its first word; invalid replies are a kind of their own.
    words = (re.match(r"\w+", action.strip().lower()) for action in rows["action"])
    return ["invalid" if invalid else word[0] if word else "none" for word, invalid in zip(words, rows["invalid"], strict=True)]


LEAST = 60  # groups that an interval is drawn from


def relative_credit(rows, names) -> dict[str, list]:
    """{kind of action: [its mean credit less that of all rows, one array over `names` per matched group]}.

    A matched group is the rows of one task (group id) that answer one observation.
    """
    credit, kinds, matched = np.stack([per_action(rows[name]) for name in names], 1), np.array(action_kinds(rows)), {}
    for n, key in enumerate(zip(rows["group"].tolist(), rows["observation"], strict=True)):
        matched.setdefault(key, []).append(n)
    result = {}
    for members in map(np.array, matched.values()):
        # Paper silent: a matched group needs two trajectories and two kinds of action; credit is relative to the mean of its rows.
        if len(set(rows["traj"][members])) > 1 and len(set(kinds[members])) > 1:
            for kind in set(kinds[members]):
                difference = credit[members[kinds[members] == kind]].mean(0) - credit[members].mean(0)
                result.setdefault(str(kind), []).append(difference)
    return result


def interval(x, *, comparisons: int, draws: int = 6000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over groups, and its bootstrap interval at the level 1 - 0.05 / comparisons. x: (G, ...) -> three (...)."""
    # Paper silent: each matched group counts once in the mean of a kind, and groups are what the bootstrap draws.
    x, rng = np.asarray(x, np.float64), np.random.default_rng(0)
    means = np.stack([x[rng.integers(len(x), size=len(x))].mean(0) for _ in range(draws)])
    tail = 0.05 / comparisons / 2
    return x.mean(0), *np.quantile(means, (tail, 1 - tail), axis=0)


def action_table(samples: dict, names, *, least: int = LEAST) -> list[dict]:
    """A line per kind of action with at least `least` groups and per name: mean and interval of `relative_credit`."""
    samples = {kind: x for kind, x in sorted(samples.items()) if len(x) >= least}
    lines = []
    for kind, x in samples.items():
        # Paper silent: Bonferroni's factor is the number of intervals of the table.
        mean, low, high = interval(x, comparisons=len(samples) * len(names))
        for k, name in enumerate(names):
            lines.append({"action": kind, "credit": name, "groups": len(x), "mean": mean[k], "low": low[k], "high": high[k]})
    return lines


def first_steps(rows) -> list[tuple[str, dict]]:
    """(game, {kind of action: step of its first occurrence, from 1}) of each trajectory."""
    first = {}
    for traj, task, step, kind in zip(rows["traj"].tolist(), rows["task"], rows["step"].tolist(), action_kinds(rows), strict=True):
        first.setdefault(traj, (task, {}))[1].setdefault(kind, step + 1)
    return list(first.values())


def compare_first_steps(ours, theirs, *, least: int = LEAST) -> list[dict]:
    """A line per kind of action that both runs did in at least `least` common games: first occurrences, and their difference.

    ours, theirs: `first_steps` of all iterations. share: of the trajectories of the common games that have the action.
    """
    games = {task for task, _ in ours} & {task for task, _ in theirs}
    first, share = [], []
    for run in (ours, theirs):
        run, found = [(task, kinds) for task, kinds in run if task in games], {}
        for task, kinds in run:
            for kind, step in kinds.items():
                found.setdefault(kind, {}).setdefault(task, []).append(step)
        share.append({kind: sum(map(len, tasks.values())) / len(run) for kind, tasks in found.items()})
        # Paper silent: first occurrences are means over a game's trajectories that have the action, and games are paired.
        first.append({kind: {task: np.mean(steps) for task, steps in tasks.items()} for kind, tasks in found.items()})
    pairs = {}
    for kind in sorted(first[0].keys() & first[1].keys()):
        both = sorted(first[0][kind].keys() & first[1][kind].keys())
        if len(both) >= least:
            pairs[kind] = np.array([[run[kind][task] for task in both] for run in first])  # (2, games)
    lines = []
    for kind, (a, b) in pairs.items():
        mean, low, high = interval(b - a, comparisons=len(pairs))
        runs = {"share": share[0][kind], "other_share": share[1][kind], "first": a.mean(), "other_first": b.mean()}
        lines.append({"action": kind, "games": len(a), **runs, "later": mean, "low": low, "high": high})
    return lines


# ------------------------------------------------------------------------------------------------------------- reports


def markdown(lines) -> str:
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in line.values()] for line in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(lines[0]), ["---"] * len(lines[0]), *cells])


def blocks(lines, n: int = 5) -> list[dict]:
    """Lines of iterations as at most n means over consecutive ones, to print: a line per quantity, a column per part of the run."""
    parts = [[lines[k] for k in part] for part in np.array_split(np.arange(len(lines)), min(n, len(lines)))]
    result = [{"mean of iterations": name} for name in lines[0] if name != "iteration"]
    for part in parts:
        first, last = part[0]["iteration"], part[-1]["iteration"]
        for row in result:
            x = np.array([line[row["mean of iterations"]] for line in part], np.float64)
            row[f"{first}-{last}" if last > first else str(first)] = x[np.isfinite(x)].mean() if np.isfinite(x).any() else np.nan
    return result


def write_csv(path: Path, lines):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)


def figure(columns: int, height: float, width: float = 4.6):
    """A figure with a row of plots, and these; inches, width of each plot."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width * columns, height), dpi=120, layout="constrained")
    return fig, fig.subplots(1, columns, squeeze=False)[0]


def draw_lines(path: Path, lines, panels: dict):
    """A panel for each {title: columns of the lines}, over iterations."""
    fig, axes = figure(len(panels), 3.4)
    for ax, (title, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            ax.plot([x["iteration"] for x in lines], [x[name] for x in lines], marker=".", label=name)
        ax.set(title=title, xlabel="iteration", ylim=(0, None))
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.3)
        if len(names) > 1:
            ax.legend(fontsize=8)
    fig.savefig(path)


def draw_intervals(path: Path, panels: dict, mean: str):
    """A panel for each {title: lines with an action, a mean, low and high}."""
    fig, axes = figure(len(panels), 1.4 + 0.28 * max(map(len, panels.values())))
    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        for y, x in enumerate(reversed(lines)):
            ax.plot([x["low"], x["high"]], [y, y], color="0.4")
            ax.plot(x[mean], y, "o", color="C0" if x[mean] >= 0 else "C1")
        ax.set_yticks(range(len(lines)), [x["action"] for x in reversed(lines)])
        ax.set_title(title)
        ax.locator_params(axis="x", nbins=5)
        ax.axvline(0, color="0.6", lw=0.8)
        ax.grid(alpha=0.3, axis="x")
    fig.savefig(path)


def collect(run: Path) -> dict:
    """What the reports of a run are made of; reads one iteration at a time."""
    lines, weights, samples, firsts = [], [], {}, []
    for number, path in tqdm(row_files(run).items(), desc=str(run), leave=False):
        rows = load_rows(path)
        cfg = method_of(run, rows)
        lines.append({"iteration": number} | play(rows) | credit_sizes(rows) | (peer_counts(rows, cfg) if cfg else {}))
        weights += [{"iteration": number} | weight_changes(rows, cfg)] if cfg else []
        names = [name for name in ("adv", "adv_history", "adv_future") if name in rows]
        for kind, x in relative_credit(rows, names).items():
            samples.setdefault(kind, []).extend(x)
        firsts += first_steps(rows)
    return {"lines": lines, "weights": weights, "samples": samples, "names": names, "firsts": firsts}


def report(run: Path, lines, weights, samples, names, firsts) -> str:
    """Write tables and plots of what `collect` found to RUN/analysis -> the tables, to print."""
    out, missing = run / "analysis", []
    out.mkdir(exist_ok=True)
    text = [f"# {run}: {len(lines)} iterations, {len(firsts)} trajectories"]

    def table(name, lines, title, shown=None):
        write_csv(out / f"{name}.csv", lines)
        text.append(f"## {title}\n\n{markdown(shown or lines)}")

    table("iterations", lines, "Over training", blocks(lines))
    panels = {"share of trajectories, of actions": ["success", "truncated", "invalid"], "share of revisits": ["revisits"]}
    draw_lines(out / "play.png", lines, panels | {"steps": ["steps"], "steps per success": ["steps_per_success"]})
    sizes = [name for name in lines[0] if name.startswith("abs ")]
    ratios = [name for name in lines[0] if "/" in name]
    draw_lines(out / "credit.png", lines, {"mean size over the actions": sizes} | {name: [name] for name in ratios})
    missing += [] if ratios else ["advantages of history, future, context and episode"]
    if weights:
        pairs, points = np.array([x["pairs"] for x in weights]), [name for name in weights[0] if name.startswith(">")]
        means = {name: np.nansum(pairs * [x[name] for x in weights]) / max(1, pairs.sum()) for name in points}
        shown = [{"points": name, "share of the weights": x} for name, x in means.items()]
        table("weights", weights, f"Peer weights that the history summary changes ({pairs.sum()} pairs)", shown)
        draw_lines(out / "weights.png", weights, {"share of weights changed, points": points})
        draw_lines(out / "peers.png", lines, {"share of fallback queries": ["fallback"], "peers per step": ["peers"]})
    else:
        missing += ["peers and their weights"]
    if found := action_table(samples, names):
        table("actions", found, "Relative credit of actions within matched groups of task and observation")
        draw_intervals(out / "actions.png", {name: [x for x in found if x["credit"] == name] for name in names}, "mean")
    else:
        most = max(map(len, samples.values()), default=0)
        text.append(f"Relative credit of actions: left out, as it takes {LEAST} matched groups per kind; the most here are {most}.")
    if missing:
        text.append(f"Left out, as the algorithm has none: {'; '.join(missing)}.")
    (out / "tables.md").write_text("\n\n".join(text) + "\n")
    return "\n\n".join(text)


def compare(run: Path, ours, other: Path, theirs) -> str:
    """First occurrences of a run's actions against another's; written beside the run's other tables."""
    name, common = f"first_actions-{other.name}", {task for task, _ in ours} & {task for task, _ in theirs}
    lines = compare_first_steps(ours, theirs)
    if not lines:
        return f"First occurrences of actions in {run} and {other}: left out, as it takes {LEAST} games in common; there are {len(common)}."
    write_csv(run / "analysis" / f"{name}.csv", lines)
    title = f"steps later in {other.name} than in {run.name}"
    draw_intervals(run / "analysis" / f"{name}.png", {title: lines}, "later")
    text = f"## First occurrence of actions: {run} against {other} ({len(common)} games in common)\n\n{markdown(lines)}"
    with open(run / "analysis" / "tables.md", "a") as file:
        file.write(f"\n{text}\n")
    return text


# ---------------------------------------------------------------------------------------------------------------- page

SYMBOLS = {
    "adv": "A", "adv_history": "A<sup>H</sup>", "adv_future": "A<sup>F</sup>", "adv_context": "A<sub>CC</sub>",
    "adv_episode": "A<sub>EP</sub>", "ret": "G", "return_target": "Y", "baseline": "B[Y]", "value": "V", "delta_value": "&Delta;V",
    "tau": "&tau;",
}  # fmt: skip
PEERS_SHOWN = 20

PAGE = string.Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark; --pos: 33, 113, 181; --neg: 217, 95, 2; --bg: #fff; --card: #f6f7f9; --line: #d8dce2;
  --fg: #1a1d21; --dim: #59616b }
@media (prefers-color-scheme: dark) {
  :root { --pos: 66, 146, 224; --neg: 226, 112, 30; --bg: #14171b; --card: #1c2025; --line: #343a42; --fg: #e7eaee; --dim: #a0a8b2 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem 1.25rem 3rem; max-width: 84rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums }
h1 { font-size: 1.25rem; margin: 0 0 .2rem }
h2 { font-size: 1rem; margin: 0 0 .4rem }
sup, sub { line-height: 0 }
.dim, th, dt { color: var(--dim) }
.pos { background: rgba(var(--pos), calc(var(--a, 1) * .75)) }
.neg { background: rgba(var(--neg), calc(var(--a, 1) * .75)) }
.legend { display: flex; align-items: center; gap: .6rem; margin: .7rem 0 1rem; flex-wrap: wrap }
.scale { width: 14rem; height: .9rem; border: 1px solid var(--line); border-radius: 3px; background: linear-gradient(to right,
  rgba(var(--neg), .75), rgba(var(--neg), 0) 50%, rgba(var(--pos), 0) 50%, rgba(var(--pos), .75)) }
.columns { display: grid; grid-template-columns: minmax(0, 1fr) 27rem; gap: 1.25rem; align-items: start }
.step, aside { border: 1px solid var(--line); border-radius: 6px; background: var(--card); padding: .6rem .8rem }
.step { margin-bottom: .7rem; cursor: pointer }
.step.selected { border-color: var(--fg); box-shadow: 0 0 0 1px var(--fg) }
.step header { display: flex; gap: .3rem 1rem; align-items: center; flex-wrap: wrap; margin-bottom: .35rem }
.step header a { color: inherit; font-weight: 600 }
.part { display: inline-flex; align-items: center; gap: .35rem; font-size: .85rem }
.bar { position: relative; width: 5rem; height: .7rem; border: 1px solid var(--line);
  background: linear-gradient(var(--dim), var(--dim)) center / 1px 100% no-repeat }
.bar i { position: absolute; top: 0; bottom: 0 }
.observation { color: var(--dim) }
.observation, .reply, .action { white-space: pre-wrap; overflow-wrap: anywhere }
.reply, .action, .what { font-family: ui-monospace, monospace; font-size: .86rem }
.reply { margin: .35rem 0 }
.action b { padding: .1rem .35rem; border-radius: 3px; font-weight: 600 }
aside { position: sticky; top: .75rem; max-height: calc(100vh - 1.5rem); overflow: auto }
dl { display: grid; grid-template-columns: repeat(3, auto 1fr); gap: .1rem .5rem; margin: 0 0 .6rem; font-size: .86rem }
dd { margin: 0 }
p { margin: .4rem 0 }
table { border-collapse: collapse; width: 100%; font-size: .84rem }
th { text-align: left; font-weight: 500 }
td, th { padding: .12rem .5rem .12rem 0; vertical-align: top; border-top: 1px solid var(--line) }
td.n, th.n { text-align: right; white-space: nowrap }
td.share { background: linear-gradient(to left, rgba(var(--pos), .4) calc(var(--a) * 100%), transparent 0) }
@media (max-width: 60rem) {
  .columns { grid-template-columns: minmax(0, 1fr) }
  aside { order: -1; top: 0; max-height: 40vh; z-index: 1 }
}
</style>
<h1>$title</h1>
<div class="dim">$about</div>
<div class="legend"><span>$low</span><span class="scale"></span><span>$high</span><span class="dim">$colours</span></div>
<div class="columns"><main>
$cards
</main><aside id="panel" aria-live="polite"></aside></div>
$details
<script>
const panel = document.getElementById("panel"), steps = [...document.querySelectorAll(".step")];
function select(step) {
  panel.replaceChildren(document.getElementById("about-" + step.id).content.cloneNode(true));
  for (const s of steps) s.classList.toggle("selected", s === step);
}
for (const s of steps) s.addEventListener("click", () => select(s));
const linked = () => steps.find(s => "#" + s.id === location.hash);
addEventListener("hashchange", () => linked() && select(linked()));
select(linked() || document.getElementById("$first"));
</script>
</html>
""")


def number(x: float) -> str:
    return "-" if np.isnan(x) else f"{x:+.3f}".replace("-", "\N{MINUS SIGN}")


def tint(x: float, scale: float) -> str:
    """Class and strength of a diverging colour: blue above 0, orange below."""
    return f'class="{"pos" if x >= 0 else "neg"}" style="--a:{min(1.0, abs(x) / scale):.3f}"'


def bar(label: str, x: float, scale: float) -> str:
    width, sign = 50 * min(1.0, abs(x) / scale), "pos" if x >= 0 else "neg"
    filled = f'<i class="{sign}" style="left:{50 if x >= 0 else 50 - width:.1f}%;width:{width:.1f}%"></i>'
    return f'<span class="part"><span>{label}</span><span class="bar">{filled}</span> {number(x)}</span>'


def recompute(rows, cfg) -> dict:
    """Y, B[Y], V, dV and tau of every row by the algorithm's own function: {name: (N,)}."""
    order = {name: rows[name] for name in ("traj", "step")}
    to_go = ccpo_context.rewards_to_go(rewards=rows["reward"], gamma=cfg.gamma, **order)
    settings = {name: getattr(cfg, name) for name in ccpo_context.contextual_credit.__kwdefaults__ if name != "env_return"}
    credit = ccpo_context.contextual_credit(
        task=rows["group"], **order, obs=rows["observation"], hidden=rows["hidden"], outcome=rows["outcome"],
        invalid=rows["invalid"], env_return=to_go, **settings,
    )  # fmt: skip
    return {name: credit[name] for name in ("return_target", "baseline", "value", "delta_value", "tau")}


def peer_table(rows, target, query, peers, shares) -> str:
    """The peers of a step, heaviest first. target: Y of every row; query: a row; peers, shares: (m,) rows and their weights."""
    heaviest = np.argsort(-shares, kind="stable")
    lines = ['<table><tr><th class="n">traj<th class="n">step<th>action<th class="n">Y<th class="n">weight']
    for v, share in zip(peers[heaviest[:PEERS_SHOWN]], shares[heaviest], strict=False):
        place = f'<tr><td class="n">{rows["traj"][v]}<td class="n">{rows["step"][v] + 1}'
        action = f'<td class="what">{html.escape(rows["action"][v])}<td class="n">{target[v]:.2f}'
        lines.append(f'{place}{action}<td class="n share" style="--a:{share:.3f}">{100 * share:.1f} %')
    rest = shares[heaviest[PEERS_SHOWN:]]
    same = all(rows["observation"][v] == rows["observation"][query] for v in peers)
    who = "with the same observation" if same else "all steps of the others: none of them saw this observation"
    more = f'<p class="dim">and {len(rest)} more, {100 * rest.sum():.1f} % together' if len(rest) else ""
    return f'<p class="dim">{len(peers)} peers, {who}</p>{"".join(lines)}</table>{more}'


def choose(rows) -> int:
    """A trajectory worth reading: the best of the first group with mixed outcomes, else the best of all."""
    outcome, group = rows["outcome"], rows["group"]
    mixed = [g for g in dict.fromkeys(group.tolist()) if np.ptp(outcome[group == g]) > 0]
    members = np.flatnonzero(group == mixed[0]) if mixed else np.arange(len(group))
    return int(rows["traj"][members[outcome[members].argmax()]])


def step_card(rows, n, here, bars, scale) -> str:
    """Observation, reply token by token, and action of row n."""
    adv, tokens = np.broadcast_to(rows["adv"][n], len(rows["reply"][n])), []
    for piece, a, logp in zip(rows["reply"][n], adv, rows["logp_old"][n], strict=True):
        tokens.append(f'<span {tint(a, scale)} title="A {number(a)}, log-prob {number(logp)}">{html.escape(piece)}</span>')
    notes = [f"invalid: {rows['problem'][n]}"] * bool(rows["invalid"][n]) + [f"reward {rows['reward'][n]:g}"] * bool(rows["reward"][n])
    action = f"<b {tint(adv.mean(), scale)}>{html.escape(rows['action'][n])}</b>"
    return f"""<article class="step" id="{here}"><header><a href="#{here}">step {rows["step"][n] + 1}</a>{bars}</header>
<div class="observation">{html.escape(rows["observation"][n])}</div><div class="reply">{"".join(tokens)}</div>
<div class="action">&rarr; {action} <span class="dim">{html.escape(", ".join(notes))}</span></div></article>"""


def page(run: Path, iteration: int, rows: dict, traj: int) -> str:
    """One trajectory as HTML that stands alone: what was seen, said and done, coloured by its advantage."""
    members, cfg = np.flatnonzero(rows["traj"] == traj), method_of(run, rows)
    if not len(members):
        raise UserError(f"--traj {traj}: iteration {iteration} has rows of {rows['traj'].min()} to {rows['traj'].max()}; give one of them.")
    credit = [name for name, x in rows.items() if isinstance(x, list) and isinstance(x[0], np.ndarray)]
    fields = {name: per_action(rows[name]) for name in credit if not name.startswith(("logp", "fallback"))}
    peers = dict.fromkeys(members, "")
    if cfg:
        fields |= recompute(rows, cfg)
        for queries, bucket, shares, is_peer in peer_shares(rows, cfg, summary_weight=cfg.summary_weight):
            for q in np.flatnonzero(rows["traj"][queries] == traj):
                chosen = bucket[is_peer[q]], shares[q, is_peer[q]]
                peers[queries[q]] = peer_table(rows, fields["return_target"], queries[q], *chosen)

    fields = {name: fields[name] for name in SYMBOLS | fields if name in fields}
    parts = ["adv", *(name for name in ("adv_history", "adv_future") if name in rows)]
    parts += ["adv_episode"] if cfg and cfg.alpha_ep else []
    widest = max(np.abs(fields[name][members]).max() for name in parts) or 1.0
    scale = float(max(np.abs(rows["adv"][n]).max() for n in members)) or 1.0
    cards, details = [], []
    for n in members:
        here = f"step-{rows['step'][n] + 1}"
        cards.append(step_card(rows, n, here, "".join(bar(SYMBOLS[name], fields[name][n], widest) for name in parts), scale))
        numbers = "".join(f"<dt>{SYMBOLS.get(name, html.escape(name))}<dd>{number(x[n])}" for name, x in fields.items())
        details.append(f'<template id="about-{here}"><h2>Step {rows["step"][n] + 1}</h2><dl>{numbers}</dl>{peers[n]}</template>')

    n, played = members[0], json.loads((run / "config.json").read_text())
    ended = "success" if rows["success"][n] else "truncated" if rows["truncated"][n] else "no success"
    group = np.flatnonzero(rows["group"] == rows["group"][n])
    outcomes = ", ".join(f"{t}: {x:g}" for t, x in dict(zip(rows["traj"][group], rows["outcome"][group], strict=True)).items())
    game = f"{played['algo']} on {played['env']}, iteration {iteration}, {rows['task'][n]} ({rows['kind'][n]})."
    unit = "token" if any(len(rows["adv"][n]) > 1 for n in members) else "action"
    return PAGE.substitute(
        title=html.escape(f"Trajectory {traj}: {ended} after {len(members)} steps"), low=number(-scale), high=number(scale),
        about=html.escape(f"{game} Outcomes of its group, by trajectory: {outcomes}."),
        colours=f"advantage A, one per {unit}; point at a token for its numbers, choose a step for its {'peers' if cfg else 'values'}",
        cards="\n".join(cards), details="\n".join(details),
        first=f"step-{rows['step'][members[np.abs(fields['adv'][members]).argmax()]] + 1}",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- main


def render(run: Path, target: Path, iteration: int | None, traj: int | None) -> str:
    files = row_files(run)
    iteration = max(files) if iteration is None else iteration
    if iteration not in files:
        raise UserError(f"--iteration {iteration}: {run} has rows of the iterations {min(files)} to {max(files)}; give one of them.")
    rows = load_rows(files[iteration])
    traj = choose(rows) if traj is None else traj
    target.write_text(page(run, iteration, rows, traj), encoding="utf-8", errors="replace")
    return f"{target}: trajectory {traj} of iteration {iteration}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs that were trained with --log_rows")
    parser.add_argument("--render", type=Path, metavar="FILE", help="write one episode of the run there as an HTML page, and no tables")
    parser.add_argument("--iteration", type=int, help="of the episode (default: the last)")
    parser.add_argument("--traj", type=int, help="its trajectory (default: a success in a group with mixed outcomes)")
    args = parser.parse_args(argv)
    if args.render:
        if len(args.runs) > 1:
            parser.error("--render takes one run")
        return print(render(args.runs[0], args.render, args.iteration, args.traj))
    if args.iteration is not None or args.traj is not None:
        parser.error("--iteration and --traj go with --render")
    firsts = []
    for run in args.runs:
        found = collect(run)
        firsts.append(found["firsts"])
        print(report(run, **found), end="\n\n")
    for other, first in zip(args.runs[1:], firsts[1:], strict=True):
        print(compare(args.runs[0], firsts[0], other, first), end="\n\n")
    print(f"tables and plots: {', '.join(str(run / 'analysis') for run in args.runs)}")


if __name__ == "__main__":
    run_script(main)
