"""Milliseconds that an ALFWorld game costs: the stock engine against `alfworld_fast`, in one run.

    python bench/alfworld.py                       # 6 small and 6 whole rooms, one of each family, 30 steps: 1-2 minutes
    python bench/alfworld.py --games 12 --steps 50

Makes its own games in a temporary folder. Both engines play the same commands and must answer the same, so this is a
proof as well. "first": the game is new to the process; "again": it was played before, as by the other rollouts of a
group. Times are CPU time of this one thread (everything here computes, nothing waits), so a busy machine disturbs little.

Stock means the environment of alfworld's AlfredTWEnv with its one library kept; copying and loading the 34 MB library for
every new environment, as textworld does, would come on top.
"""

import argparse
import functools
import importlib.metadata
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this folder, where `alfworld` would be this file

import fast_downward  # noqa: E402
from tqdm import tqdm  # noqa: E402

import alfworld_fast  # noqa: E402
from mini import alfworld_games  # noqa: E402


class Clock:
    """Adds up the CPU seconds and calls of the functions given to it."""

    def __init__(self):
        self.seconds, self.calls = 0.0, 0

    def __call__(self, function, *args, **kwargs):
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            self.seconds += time.process_time() - start
            self.calls += 1

    @property
    def ms(self):
        return 1e3 * self.seconds / max(self.calls, 1)


def play(game, path, commands, start, step):
    """Plays a game by fixed commands, or by random ones where `commands` is empty (and fills it). Returns the transcript."""
    rng, chosen = random.Random(path), not any(commands)
    transcript = [start(game.start, path)]
    for i in range(len(commands)):
        if chosen:
            commands[i] = rng.choice(transcript[-1][1])
        transcript.append(step(game.step, commands[i]))
    return transcript


def measure(paths, steps, bar):
    """{(engine, part): Clock} for engines stock, first, again and parts start, step, and the parts of a start."""
    clocks = {(engine, part): Clock() for engine in ("stock", "first", "again") for part in ("start", "step")}
    clocks |= {("stock", "load"): Clock(), ("stock", "reset"): Clock(), ("first", "translate"): Clock(), ("again", "load_sas"): Clock()}
    stock, fast = alfworld_fast.Game(fast=False), alfworld_fast.Game()
    if not fast.fast:
        sys.exit("nothing to measure: the installed versions are not those that the fast path is proven for")
    env, library, translate = stock._engine.env, fast._engine.library, fast_downward.pddl2sas
    load, reset, load_sas = env.load, env.reset, library.load_sas
    env.load, env.reset = functools.partial(clocks["stock", "load"], load), functools.partial(clocks["stock", "reset"], reset)
    for path in paths:
        commands = [""] * steps
        transcripts = [play(stock, path, commands, clocks["stock", "start"], clocks["stock", "step"])]
        bar.update()
        fast_downward.pddl2sas = functools.partial(clocks["first", "translate"], translate)
        transcripts.append(play(fast, path, commands, clocks["first", "start"], clocks["first", "step"]))
        fast_downward.pddl2sas = translate
        library.load_sas = functools.partial(clocks["again", "load_sas"], load_sas)
        transcripts.append(play(fast, path, commands, clocks["again", "start"], clocks["again", "step"]))
        library.load_sas = load_sas
        bar.update()
        assert transcripts[0] == transcripts[1] == transcripts[2], f"the engines differ on {path}"
    env.load, env.reset = load, reset
    stock.close()
    fast.close()
    return clocks


def report(rooms, clocks, games, steps):
    ms = {key: clock.ms for key, clock in clocks.items()}
    for engine in ("stock", "first", "again"):
        ms[engine, "episode"] = ms[engine, "start"] + steps * ms[engine, "step"]
    print(f"\n{rooms} rooms, {games} games ({ms['stock', 'load']:.0f} ms of stock's start is load, {ms['stock', 'reset']:.0f} ms reset)")
    print(f"{'ms':34} {'stock':>9} {'first':>9} {'':>7} {'again':>9} {'':>7}")
    for part, name in (("start", "start (load and reset)"), ("step", "step"), ("episode", f"episode (start and {steps} steps)")):
        stock, first, again = (ms[engine, part] for engine in ("stock", "first", "again"))
        print(f"{name:34} {stock:9.2f} {first:9.2f} {f'x{stock / first:.1f}':>7} {again:9.2f} {f'x{stock / again:.1f}':>7}")
    translating = ms["first", "translate"] / ms["first", "start"]
    reading = ms["again", "load_sas"] / ms["again", "start"]
    print(f"What is left: {translating:.0%} of a first start is fast-downward's translation of the PDDL (Python), "
          f"{reading:.0%} of a start again is the planner reading the translation (C++).")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=6, help="games of each size, of different families (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="steps of an episode (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other games (default: %(default)s)")
    args = parser.parse_args()
    if args.games < 1 or args.steps < 1:
        parser.error("--games and --steps must be 1 or more")

    with open("/proc/cpuinfo") as f:
        model = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), platform.machine())
    packages = ("alfworld", "textworld", "fast-downward-textworld")
    print(f"{model}, {os.cpu_count()} cores, Python {platform.python_version()},",
          ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages))
    with tempfile.TemporaryDirectory() as folder, tqdm(total=4 * args.games, unit="game", leave=False) as bar:
        results, once = {}, Clock()
        for rooms in ("small", "whole"):
            paths = alfworld_games.generate(Path(folder) / rooms, train=args.games + 1, seen=0, unseen=0, rooms=rooms,
                                            seed=args.seed, progress=False)
            game = alfworld_fast.Game()
            once(game.start, paths[-1])  # the first start of a process also parses the grammar: not counted below
            game.close()
            results[rooms] = measure(paths[:-1], args.steps, bar)
    for rooms, clocks in results.items():
        report(rooms, clocks, args.games, args.steps)


if __name__ == "__main__":
    main()
