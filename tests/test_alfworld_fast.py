"""alfworld_fast against the stock engine, and what a long run must not lose: disk, mappings, memory."""

import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("textworld")
pytest.importorskip("alfworld")

import alfworld_fast
from alfworld_fast import Game
from mini import alfworld_games

FAMILIES = list(alfworld_games.FAMILIES)
VERBS = {"go", "open", "close", "take", "move", "examine", "use", "heat", "cool", "clean", "look", "inventory", "help"}


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """Paths by name: one small game of each family, and a whole room."""
    small = alfworld_games.generate(tmp_path_factory.mktemp("small"), train=6, seen=0, unseen=0, progress=False)
    whole = alfworld_games.generate(tmp_path_factory.mktemp("whole"), train=1, seen=0, unseen=0, rooms="whole", progress=False)
    return dict(zip(FAMILIES, small, strict=True)) | {"whole room": whole[0]}


@pytest.fixture(scope="module")
def engines():
    stock, fast = Game(fast=False), Game()
    assert fast.fast, "the installed versions are not those that the fast path is proven for"
    yield stock, fast
    stock.close()
    fast.close()


def both(engines, method, argument):
    stock, fast = (getattr(game, method)(argument) for game in engines)
    assert fast == stock, f"{method}({argument!r})"
    return fast


def random_walk(engines, path, steps, seed=0):
    """Plays random commands on both engines, every verb about equally often, some unknown or oddly spaced. Returns its verbs."""
    rng, used = random.Random(seed), set()
    _, admissible = both(engines, "start", path)
    for _ in range(steps):
        verb = rng.choice(sorted({command.split()[0] for command in admissible}))
        command = rng.choice([command for command in admissible if command.split()[0] == verb])
        used.add(verb)
        command = rng.choice([command] * 8 + [f" {command}\n", command.upper(), "go to nowhere 1", ""])
        admissible = both(engines, "step", command)[1]
    return used


def walkthrough(engines, path):
    """Plays the expert's commands on both engines until the game is won, and two steps on. Returns its verbs."""
    feedback, admissible = both(engines, "start", path)
    expert, verbs = alfworld_games.Expert(path, feedback), set()
    for _ in range(100):
        command = expert.act(feedback, admissible)
        verbs.add(command.split()[0])
        feedback, admissible, won, done = both(engines, "step", command)
        assert won == done
        if won:
            both(engines, "step", "inventory")
            both(engines, "step", admissible[-1])
            return verbs
    raise AssertionError(f"the expert did not win {path}")


def test_same_transcript_in_all_families(engines, games):
    verbs = set()
    for seed, name in enumerate(games):
        verbs |= random_walk(engines, games[name], 15, seed) | walkthrough(engines, games[name])
    assert verbs >= VERBS


@pytest.mark.slow
def test_same_transcript_in_many_games(engines, tmp_path):
    for rooms in ("small", "whole"):
        paths = alfworld_games.generate(tmp_path / rooms, train=0, seen=0, unseen=6, rooms=rooms, seed=5, progress=False)
        for seed, path in enumerate(paths):
            random_walk(engines, path, 40, seed)
            walkthrough(engines, path)


def edited(path, folder, edit):
    """A copy of a game whose grammar text was changed by `edit`."""
    data = json.loads(Path(path).read_text())
    grammar = edit(data["grammar"])
    assert grammar != data["grammar"]
    copy = folder / "game.tw-pddl"
    copy.write_text(json.dumps(data | {"grammar": grammar}))
    return str(copy)


@pytest.mark.parametrize("sentence", ["don't drop the caf\\u00e9's mug, please", "put it \\\\ there", "place: 2 (two) mugs/cups!"])
def test_task_sentence_is_the_games_own(engines, games, tmp_path, sentence):
    path = edited(games[FAMILIES[0]], tmp_path, lambda text: alfworld_fast.TASK.sub(lambda _: f'"Your task is to: {sentence}."', text))
    feedback, _ = both(engines, "start", path)
    assert feedback.endswith("Your task is to: " + json.loads(f'"{sentence}"') + ".")
    assert feedback.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.")


def test_grammar_without_a_task_sentence(engines, games, tmp_path):
    path = edited(games[FAMILIES[0]], tmp_path, lambda text: text.replace("Your task is to: ", "Do this: "))
    assert "\n\nDo this: " in both(engines, "start", path)[0]


def test_commands_whose_text_depends_on_the_facts(engines, games, tmp_path):
    def edit(text):
        full = '{"condition": "holdsany(a:agent)", "rhs": "inventory [{o.name | holds(a:agent, o:object)}]"}'
        text = text.replace('"inventory.feedback": [', f'"bag": [{full}, {{"rhs": "inventory"}}], "inventory.feedback": [')
        return text.replace('template :: "inventory"', 'template :: "#bag#"')

    path = edited(games["pick_two_obj_and_place"], tmp_path, edit)
    feedback, admissible = both(engines, "start", path)
    assert "inventory" in admissible
    expert = alfworld_games.Expert(path.replace(str(tmp_path), str(Path(games["pick_two_obj_and_place"]).parent)), feedback)
    seen = set()
    for _ in range(8):
        feedback, admissible, _, _ = both(engines, "step", expert.act(feedback, admissible))
        seen |= {command for command in admissible if command.startswith("inventory ")}
    assert seen


def test_live_games_are_independent(games):
    """Three live games, two of them the same: interleaved they answer as they do alone."""
    paths = [games[FAMILIES[0]], games[FAMILIES[0]], games["pick_cool_then_place_in_recep"]]

    def play(game, path, seed):
        rng = random.Random(seed)
        feedback, admissible = game.start(path)
        yield feedback
        for _ in range(20):
            feedback, admissible, won, _ = game.step(rng.choice(admissible))
            yield feedback, admissible, won

    slots = [Game() for _ in paths]
    assert len({slot._engine.library._handle for slot in slots}) == len(slots)
    alone = [list(play(slots[0], path, seed)) for seed, path in enumerate(paths)]
    together = list(zip(*(play(slot, path, seed) for seed, (slot, path) in enumerate(zip(slots, paths, strict=True))), strict=True))
    assert [list(transcript) for transcript in zip(*together, strict=True)] == alone
    for slot in slots:
        slot.close()


def mappings():
    with open("/proc/self/maps") as f:
        return sum("libdownward" in line for line in f)


def resident_mb():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def starts(paths, number, temporary, monkeypatch):
    """Starts games over and over in two slots that are closed and opened again and again. Returns the growth of memory in MB."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    spare = [Game(), Game()]
    for game in spare:
        game.close()
    known = len(paths) + 10
    for i in range(known + number):
        if i == known:
            gc.collect()
            libraries, memory = mappings(), resident_mb()
        first, second = Game(), Game()
        first.start(paths[i % len(paths)])
        admissible = second.start(paths[-1 - i % len(paths)])[1]
        for game in (first, second):
            game.step(admissible[0])
            game.close()
            game.close()
    gc.collect()
    assert mappings() == libraries
    assert list(temporary.iterdir()) == []
    assert len(alfworld_fast._worlds) <= alfworld_fast.WORLDS
    return resident_mb() - memory


def test_starts_lose_nothing(games, tmp_path, monkeypatch):
    monkeypatch.setattr(alfworld_fast, "WORLDS", 4)  # of 7 games: some are translated anew in every round
    assert starts(list(games.values()), 30, tmp_path, monkeypatch) < 8
    assert len(alfworld_fast._worlds) == 4


@pytest.mark.slow
def test_2000_starts_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(alfworld_fast, "WORLDS", 64)
    paths = alfworld_games.generate(tmp_path / "games", train=150, seen=0, unseen=0, progress=False)
    (tmp_path / "tmp").mkdir()
    assert starts(paths, 1000, tmp_path / "tmp", monkeypatch) < 16


def test_file_is_gone_while_the_library_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = mappings()
    engine = alfworld_fast._Engine()
    assert mappings() > before and list(tmp_path.iterdir()) == []
    assert os.stat(alfworld_fast.fast_downward.interface.DOWNWARD_LIB_PATH).st_size > 20e6  # the original is untouched
    Game._idle[True].append(engine)  # for the next game


def test_a_process_with_open_and_closed_games_exits_cleanly(games):
    code = f"""
from alfworld_fast import Game
live = [Game() for _ in range(3)]
for game in live:
    game.start({games[FAMILIES[0]]!r})
live[0].close()
live.append(Game())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(alfworld_fast.__file__).parent)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_versions_use_the_stock_engine(games, monkeypatch, capsys):
    monkeypatch.setattr(alfworld_fast, "PROVEN", {"textworld": "0.0.1"})
    alfworld_fast._proven.cache_clear()
    try:
        slots = [Game(), Game()]
        assert not any(slot.fast for slot in slots)
        assert capsys.readouterr().err.count("the stock engine is used") == 1
        assert slots[0].start(games[FAMILIES[0]])[0].startswith("-= Welcome")
    finally:
        for slot in slots:
            slot.close()
        alfworld_fast._proven.cache_clear()


def test_bad_files_say_which_and_leave_the_slot_usable(games, tmp_path):
    game = Game()
    with pytest.raises(FileNotFoundError):
        game.start(tmp_path / "game.tw-pddl")
    data = json.loads(Path(games[FAMILIES[0]]).read_text())
    broken = {"empty": "", "not json": "{", "no problem": json.dumps({"grammar": data["grammar"], "pddl_domain": data["pddl_domain"]}),
              "bad pddl": json.dumps(data | {"pddl_problem": data["pddl_problem"].replace("(:objects", "(:objects agent1 - agent")})}
    for name, text in broken.items():
        path = tmp_path / f"{name}.tw-pddl"
        path.write_text(text)
        with pytest.raises(ValueError, match=name):
            game.start(path)
    assert game.start(games[FAMILIES[0]])[1]
    game.close()


def test_leaves_the_process_as_it_was(games, monkeypatch):
    monkeypatch.setattr(alfworld_fast, "_worlds", type(alfworld_fast._worlds)())
    arguments, output = list(sys.argv), sys.stdout
    game = Game()
    game.start(games[FAMILIES[0]])
    game.close()
    assert sys.argv == arguments and sys.stdout is output and gc.isenabled()
