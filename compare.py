"""Runs side by side: one line per setting, means and standard errors over its seeds.

    python compare.py runs/A runs/B runs/C ...                  a table of held-out success, in Markdown
    python compare.py runs/* --plot curves.png                  and the learning curves as a picture
    python compare.py runs/* --metric train/reply_tokens        any other metric of metrics.jsonl

Runs that agree in everything but seed and folder are one line. A line is named by what
its settings differ in from those of the first run of its method.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from analyze import figure, markdown
from envs import UserError, run_script

APART = ("out", "seed", "engine", "save_every", "log_rows")  # settings that make no other method


def read(run: Path) -> tuple[dict, int, list[dict]]:
    """(settings without those of APART, seed, the lines of metrics.jsonl) of a run."""
    try:
        config = json.loads((run / "config.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except OSError as e:
        raise UserError(f"{run} is no folder of a run ({Path(e.filename).name}: {e.strerror}); give folders that train.py wrote.") from e
    settings = {name: config[name] for name in ("algo", "env")}
    for part in ("settings", "config", "judge"):
        settings |= config.get(part, {})
    return {name: x for name, x in settings.items() if name not in APART}, config["settings"]["seed"], lines


def group(runs) -> dict[str, dict[int, list[dict]]]:
    """{name of the settings: {seed: lines}}. runs: (settings, seed, lines), as of `read`."""
    groups = {}
    for settings, seed, lines in runs:
        first = next(other for other, *_ in runs if other["algo"] == settings["algo"])
        name = " ".join([settings["algo"], *(f"{k}={x}" for k, x in settings.items() if x != first.get(k))])
        if seed in groups.setdefault(name, {}):
            raise UserError(f"Two runs of {name} have the seed {seed}; give each run once.")
        groups[name][seed] = lines
    return groups


def curve(seeds: dict[int, list[dict]], metric: str) -> dict[int, np.ndarray]:
    """{iteration: the metric of each seed}, where all of them have it."""
    values = [{m["iteration"]: m[metric] for m in lines if metric in m} for lines in seeds.values()]
    return {i: np.array([v[i] for v in values]) for i in sorted(set.intersection(*map(set, values)))}


def table(groups, metric: str, points: int = 6) -> str:
    """Markdown: the metric at up to `points` iterations that all groups share, at each one's last, and its change from first to last."""
    curves = {name: curve(seeds, metric) for name, seeds in groups.items()}
    if empty := [name for name, c in curves.items() if not c]:
        raise UserError(f"--metric {metric}: there is no iteration at which all seeds of {empty[0]} have it.")
    shared = sorted(set.intersection(*map(set, curves.values())))
    shown = [shared[k] for k in sorted({round(k) for k in np.linspace(0, len(shared) - 1, points)})] if shared else []

    def cell(x, sign=""):
        return f"{x.mean():{sign}.3f}" + (f" +- {x.std(ddof=1) / np.sqrt(len(x)):.3f}" if len(x) > 1 else "")

    lines = []
    for name, c in curves.items():
        first, last = min(c), max(c)
        line = {f"{metric} after iteration": name} | {str(i): cell(c[i]) for i in shown} | {"last": f"{last}: {cell(c[last])}"}
        lines.append(line | {"change": cell(c[last] - c[first], "+"), "seeds": ", ".join(map(str, sorted(groups[name])))})
    return markdown(lines)


def draw(groups, metric: str, picture: Path):
    """One colour per group: its mean as a line, its seeds as thin ones."""
    fig, (ax,) = figure(1, 4, width=7)
    for k, (name, seeds) in enumerate(groups.items()):
        for lines in seeds.values():
            own = curve({0: lines}, metric)
            ax.plot(own.keys(), own.values(), color=f"C{k}", alpha=0.35, linewidth=0.9)
        c = curve(seeds, metric)
        ax.plot(c.keys(), [x.mean() for x in c.values()], color=f"C{k}", marker="o", linewidth=2, label=f"{name} (n = {len(seeds)})")
    ax.set(xlabel="iteration", ylabel=metric)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    fig.savefig(picture)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument("--metric", default="eval/success", help="of metrics.jsonl (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves there")
    args = parser.parse_args(argv)
    groups = group([read(run) for run in args.runs])
    print(table(groups, args.metric))
    if args.plot:
        draw(groups, args.metric, args.plot)


if __name__ == "__main__":
    run_script(main)
