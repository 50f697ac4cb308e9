"""Evaluate an agent on every task of a split, each exactly once per repeat:

    python eval.py runs/capo_action-alfworld-.../export              the export of a run, with the run's own settings
    python eval.py Qwen/Qwen3-4B-Instruct-2507 --preset paper        a hub name or any Hugging Face folder
    python eval.py runs/.../checkpoints/000040                       a checkpoint
    python eval.py random | expert                                   a random admissible action; ALFWorld's handcoded expert

Prints a table per task family with mean and standard error; writes JSON with `--json`, readable transcripts with `--render`.
`torchrun --nproc_per_node=8 eval.py ...` spreads the tasks over ranks.
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import tqdm

import envs
import rollout
from envs import UserError


class Stopped(Exception):
    """The run was asked to stop while trajectories were being played."""


class Progress:
    """Progress bar over trajectories with the success rate as it moves; `stop()` true ends the rollout with `Stopped`."""

    def __init__(self, total: int, label: str, *, show: bool = True, stop=lambda: False):
        self.bar = tqdm(total=total, desc=label, disable=not show, leave=False, mininterval=0.5)
        self.stop, self.done, self.successes, self.failed = stop, 0, 0, 0

    def __call__(self, trajectory):
        self.done += 1
        self.successes += trajectory.success
        self.failed += bool(trajectory.failed)
        self.bar.update()
        self.bar.set_postfix(success=f"{self.successes / max(1, self.done - self.failed):.2f}", refresh=False)
        if self.stop():
            raise Stopped

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()


def play_all(engine, pool, env, tokenizer, tasks, *, repeats=1, ranks, seed, iteration=0, label="evaluation", stop=lambda: False, **play):
    """Play every task `repeats` times, spread over the ranks -> (rows, trajectories), the same on every rank.

    A group is one task. The sampling seed depends on (seed, iteration, task, repeat, step) alone: two agents that are
    evaluated meet the same games with the same luck. When `stop()` turns true both lists come back incomplete.
    """
    total = len(tasks) * repeats
    mine = range(ranks.rank * total // ranks.world, (ranks.rank + 1) * total // ranks.world)  # a group's game starts once and is remembered
    met, sample = Counter(), []
    for task in (task for task in tasks for _ in range(repeats)):  # a task that is listed twice goes on counting: other luck
        sample.append(met[task.id])
        met[task.id] += 1
    todo = [rollout.Assignment(traj=n, group=n // repeats, task=tasks[n // repeats], sample=sample[n]) for n in mine]
    with Progress(len(todo), label, show=ranks.rank == 0, stop=stop) as progress:
        try:
            played = rollout.rollout(engine, pool, env, tokenizer, todo, run_seed=seed, iteration=iteration, progress=progress, **play)
        except Stopped:
            played = [], []
    parts = ranks.gather(played)
    rows = sorted((r for p in parts for r in p[0]), key=lambda r: (r.traj, r.step))
    return rows, sorted((t for p in parts for t in p[1]), key=lambda t: t.traj)


def summary(rows, trajectories) -> dict:
    """Primary score, its standard error over tasks, and what else describes the play. A failed trajectory is left out and counted."""
    done = [t for t in trajectories if not t.failed]
    seen, revisits = set(), 0
    for r in rows:
        revisits += (r.traj, r.observation) in seen
        seen.add((r.traj, r.observation))
    by_task = {}
    for t in done:
        by_task.setdefault(t.task, []).append(primary(t))
    per_task = [float(np.mean(x)) for x in by_task.values()]
    return {
        "success": float(np.mean([primary(t) for t in done])) if done else 0.0,
        "stderr": float(np.std(per_task, ddof=1) / np.sqrt(len(per_task))) if len(per_task) > 1 else 0.0,
        "n": len(done),
        "failed": len(trajectories) - len(done),
        "steps": float(np.mean([t.steps for t in done])) if done else 0.0,
        "truncated": float(np.mean([t.truncated for t in done])) if done else 0.0,
        "invalid": float(np.mean([r.invalid for r in rows])) if rows else 0.0,
        "revisits": revisits / max(1, len(rows)),
        "reply_tokens": float(np.mean([len(r.response_ids) for r in rows])) if rows else 0.0,
        "prompt_tokens": float(np.mean([len(r.prompt_ids) for r in rows])) if rows else 0.0,
    }


def spread(tasks, n: int) -> list:
    """n tasks at even distances (0: all), so that a part of a sorted list still has every family."""
    return tasks if not n or n >= len(tasks) else [tasks[k * len(tasks) // n] for k in range(n)]


def primary(t) -> float:
    """The score in 0..1 that a task is judged by."""
    return float(t.success)


# --------------------------------------------------------------------------------------------- agents without a model


def play_scripted(env_name: str, tasks, agent: str, *, max_steps: int, seed: int) -> tuple[list, list]:
    """Rows and trajectories of "random" (a random admissible command) or "expert" (ALFWorld's handcoded expert)."""
    env, rows, trajectories = envs.environment(env_name)(), [], []
    for n, task in enumerate(tqdm(tasks, desc=agent, leave=False)):
        state = env.reset(task, seed)
        rng = np.random.default_rng((seed, n))
        if agent == "expert":
            from mini.alfworld_games import Expert

            expert = Expert(task.data["game"], state.observation)
        steps = 0
        while steps < max_steps and not state.done:
            action = expert.act(state.observation, state.admissible) if agent == "expert" else str(rng.choice(state.admissible))
            empty = np.zeros(0, np.int32)
            rows.append(rollout.Row(n, n, steps, empty, empty, empty, state.observation, action, 0.0, False, "stop", {}))
            state, steps = env.step(action), steps + 1
        trajectories.append(rollout.Trajectory(
            n, n, task.id, task.kind, float(state.success), state.success, state.score, steps, state.done, not state.done, None
        ))  # fmt: skip
    env.close()
    return rows, trajectories


# ---------------------------------------------------------------------------------------------------------- reporting


def table(rows, trajectories) -> tuple[str, dict]:
    """A table with one line per task family and one for all, and the same as {family: summary}."""
    kinds = sorted({t.kind for t in trajectories})
    groups = {kind: {t.traj for t in trajectories if t.kind == kind} for kind in kinds} | {"all": {t.traj for t in trajectories}}
    result = {
        kind: summary([r for r in rows if r.traj in ids], [t for t in trajectories if t.traj in ids]) for kind, ids in groups.items()
    }
    lines = [f"{'family':36s} {'n':>5s} {'success':>8s} {'+-':>6s} {'steps':>6s} {'revisits':>8s} {'invalid':>8s} {'failed':>6s}"]
    for kind, x in result.items():
        means = f"{x['success']:8.3f} {x['stderr']:6.3f} {x['steps']:6.1f} {x['revisits']:8.3f} {x['invalid']:8.3f}"
        lines.append(f"{kind:36s} {x['n']:5d} {means} {x['failed']:6d}")
    return "\n".join(lines), result


def transcript(rows, trajectory, tokenizer) -> str:
    """One episode to read: observation, reply, what was sent."""
    outcome = "success" if trajectory.success else "truncated" if trajectory.truncated else trajectory.failed or "no success"
    lines = [f"==== {trajectory.task} ({trajectory.kind}): {outcome} after {trajectory.steps} steps"]
    for r in rows:
        if r.traj == trajectory.traj:
            reply = tokenizer.decode(r.response_ids) if len(r.response_ids) else ""
            mark = f"  [invalid: {r.info.get('problem')}]" if r.invalid else ""
            lines += [f"-- step {r.step + 1}", r.observation, f">> {reply}", f"=> {r.action}{mark}"]
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------------------- main


def find_run(agent: str) -> tuple[str, dict | None, Path | None]:
    """(model path, the run's description or None, checkpoint folder or None) for an export, a checkpoint, a run or a hub name."""
    path = Path(agent)
    if (path / "run.json").exists():  # an export
        return agent, json.loads((path / "run.json").read_text()), None
    if (path / "config.json").exists() and (path / "checkpoints").is_dir():  # a run: its export, else its last checkpoint
        if (path / "export").is_dir():
            return find_run(str(path / "export"))
        found = sorted(p for p in (path / "checkpoints").glob("[0-9]*") if (p / "meta.json").exists())
        if not found:
            raise UserError(f"The run {agent} has no checkpoint yet; wait for one or give a model.")
        path = found[-1]
    if (path / "meta.json").exists():  # a checkpoint: the run's model with the checkpoint's weights
        run = json.loads((path.parent.parent / "config.json").read_text())
        return run["settings"]["model"], run, path
    return agent, None, None


def main(argv=None):
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    from capo_action import PRESETS
    from model import Ranks, end_tokens, model_path, tokenizer_and_context
    from train import Settings

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("agent", help="export, run or checkpoint folder, hub name, or random, or expert")
    parser.add_argument("--preset", choices=("mini", "paper"), help="settings where there is no run (default: paper with a GPU, else mini)")
    parser.add_argument("--env", help="environment (default: the run's, else alfworld)")
    parser.add_argument("--data", help="data folder (default: the run's; mini: made by the project)")
    parser.add_argument("--split", help="default: the run's, else valid_unseen")
    parser.add_argument("--tasks", type=int, help="only N tasks, at even distances (default: all)")
    parser.add_argument("--repeats", type=int, default=1, help="times that each task is played")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the run's, else 0.4)")
    parser.add_argument("--seed", type=int, help="sampling seed (default: the run's)")
    parser.add_argument("--style", choices=envs.STYLES, help="prompt style (default: the run's)")
    parser.add_argument("--max_steps", type=int, help="step limit (default: the run's)")
    parser.add_argument("--prompt_tokens", type=int, help="longest prompt (default: the run's)")
    parser.add_argument("--response_tokens", type=int, help="longest reply (default: the run's)")
    parser.add_argument("--engine", choices=("auto", "vllm", "transformers"), help="default: the run's, else auto")
    parser.add_argument("--json", metavar="FILE", help="write the table and every trajectory there")
    parser.add_argument("--render", metavar="FILE", help="write transcripts there")
    parser.add_argument("--episodes", type=int, default=5, help="number of transcripts of --render")
    args = parser.parse_args(argv)

    model, run, checkpoint = find_run(args.agent)
    preset = PRESETS[args.preset or ("paper" if torch.cuda.is_available() else "mini")]["alfworld"]
    usual = {name: value for name, value in preset.items() if name in Settings.__dataclass_fields__}
    settings = Settings(**(run["settings"] if run else usual))
    for ours, theirs in (("split", "eval_split"), ("tasks", "eval_tasks"), ("temperature", "eval_temperature"), ("seed", "eval_seed")):
        if getattr(args, ours) is not None:
            setattr(settings, theirs, getattr(args, ours))
    for name in ("data", "style", "max_steps", "prompt_tokens", "response_tokens", "engine"):
        if getattr(args, name) is not None:
            setattr(settings, name, getattr(args, name))
    s, env_name = settings, args.env or (run["env"] if run else "alfworld")
    env = envs.environment(env_name)
    s.max_steps = s.max_steps or env.max_steps
    tasks = spread(env.tasks(s.eval_split, s.data or None), s.eval_tasks)
    tokenizer = None
    if args.agent in ("random", "expert"):
        rows, trajectories = play_scripted(env_name, tasks * args.repeats, args.agent, max_steps=s.max_steps, seed=s.eval_seed)
        rank = 0
    else:
        ranks = Ranks()
        rank, path = ranks.rank, model_path(model)
        tokenizer, context = tokenizer_and_context(path)
        engine = rollout.make_engine(
            s.engine, path, dtype="bfloat16" if ranks.cuda else "float32", max_model_len=min(context, s.prompt_tokens + s.response_tokens),
            seed=s.seed, device=str(ranks.device), memory=s.gpu_memory,
        )  # fmt: skip
        ranks.say(engine.about)
        if checkpoint:
            weights = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
            state = {"policy": {"model": {f"lm.{k}": v for k, v in weights.items()}}}
            dcp.load(state, checkpoint_id=checkpoint)
            engine.load_weights((k.removeprefix("lm."), v) for k, v in state["policy"]["model"].items())
        share = -(-len(tasks) * args.repeats // ranks.world)
        pool = envs.Pool(env_name, slots=s.slots or min(64, share), workers=s.workers, deadline=s.deadline)
        rows, trajectories = play_all(
            engine, pool, env, tokenizer, tasks, repeats=args.repeats, ranks=ranks, seed=s.eval_seed, temperature=s.eval_temperature,
            style=s.style, max_steps=s.max_steps, prompt_tokens=s.prompt_tokens, response_tokens=s.response_tokens, context=context,
            history_length=s.history_length, eos_ids=end_tokens(path, tokenizer), deterministic=s.deterministic,
        )  # fmt: skip
        pool.close()
        ranks.close(engine)
    if rank == 0:
        text, result = table(rows, trajectories)
        print(f"{args.agent}: {env_name} {s.eval_split}, {len(tasks)} tasks x {args.repeats}, T = {s.eval_temperature}, seed {s.eval_seed}")
        print(text)
        if args.json:
            played = [{name: x for name, x in vars(t).items() if name != "last_prompt"} for t in trajectories]
            Path(args.json).write_text(json.dumps({"families": result, "trajectories": played}, indent=1))
        if args.render:
            Path(args.render).write_text("\n".join(transcript(rows, t, tokenizer) for t in trajectories[: args.episodes]))


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(2)  # without waiting for other ranks
