"""Makes ALFWorld games from what the `alfworld` package itself ships: no download.

    python -m mini.alfworld_games --out data/alfworld_mini                 # 2,000 train, 200 + 200 held-out games, small rooms
    python -m mini.alfworld_games --out data/whole --rooms whole --train 60 --seen 12 --unseen 12 --check

The package brings the PDDL domain, the text grammar, the goals of the six task families, which object may lie where, and the
furniture of 120 rooms. A game drawn from them is a folder with `game.tw-pddl` and `traj_data.json`, laid out like the real data set:

    OUT/json_2.1.1/{train,valid_seen,valid_unseen}/FAMILY-OBJECT-None-RECEPTACLE-ROOM/trial_00000/

so that one loader serves both. Games are solvable by construction: the target lies somewhere else than the goal, everything that is
needed is in the room and nothing can be lost for good. `--check` plays every game with the package's handcoded expert, and at random.
As in ALFWorld, `train` and `valid_seen` share their rooms and `valid_unseen` has rooms of its own; no two games are alike.

`small` rooms hold 5 pieces of the room's furniture and 4 to 6 objects (an episode takes about 10 steps), `whole` rooms all of it.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

from alfworld.agents.expert import handcoded_expert
from alfworld.agents.expert.handcoded_expert_tw import HandCodedTWAgent
from alfworld.gen import constants
from alfworld.gen.goal_library import gdict
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
from tqdm import tqdm

# Family -> (kind of object it needs, receptacle it needs). Rooms per family: constants.GOALS_VALID.
FAMILIES = {
    "pick_and_place_simple": (None, None),
    "look_at_obj_in_light": (None, None),
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge"),
    "pick_two_obj_and_place": (None, None),
}
CAN_CONTAIN = {receptacle: frozenset(objects) for receptacle, objects in constants.VAL_RECEPTACLE_OBJECTS.items()
               if receptacle not in constants.MOVABLE_RECEPTACLES_SET}
LAMP_STANDS = ("Desk", "SideTable", "Dresser", "DiningTable", "CoffeeTable", "Shelf")  # the package does not say where a lamp stands
LAYOUTS = Path(constants.__file__).parent / "layouts"
DEFAULT_DATA = Path(__file__).resolve().parent.parent / "data" / "alfworld_mini"
SMALL_RECEPTACLES = 5


@dataclass(frozen=True)
class Room:
    scene: int
    receptacles: tuple  # of (id, type), e.g. ("Cabinet|+00.68|+00.50|-02.20", "Cabinet")
    objects: tuple  # types of the objects that belong here and can be carried


@dataclass(frozen=True)
class Description:
    """One game before it is written: everything that the player can see or change."""

    family: str
    scene: int
    target: str  # object type
    goal: str  # receptacle type, "" for look
    sentence: str
    receptacles: tuple  # of (id, type)
    objects: tuple  # of (id, type, receptacle id)


def read_room(scene):
    """The furniture of one of the package's rooms. Layouts list the receptacles that can be reached by id; of others that the room
    has (bins, toilets, stoves ...) only the type is known, so these get one made-up position each."""
    with open(LAYOUTS / f"FloorPlan{scene}-openable.json") as f:
        reachable = json.load(f)
    with open(LAYOUTS / f"FloorPlan{scene}-objects.json") as f:
        types = set(json.load(f))
    receptacles = []
    for name in reachable:
        kind = name.split("|")[0]
        if kind in ("Sink", "Bathtub"):  # objects lie in its basin, which is what the player sees
            kind += "Basin"
            name = name if name.endswith(kind) else f"{name}|{kind}"
        if kind in CAN_CONTAIN:
            receptacles.append((name, kind))
    missing = sorted(types & CAN_CONTAIN.keys() - {kind for _, kind in receptacles})
    for i, kind in enumerate(missing):
        shown = f"|{kind}" if kind.endswith("Basin") else ""
        receptacles.append((f"{kind.removesuffix('Basin')}|+{i:02d}.00|+00.00|+00.00{shown}", kind))
    kinds = {kind for _, kind in receptacles}
    objects = sorted(o for o in types if any(o in CAN_CONTAIN[kind] for kind in kinds) or o == "DeskLamp")
    return Room(scene, tuple(sorted(receptacles)), tuple(objects))


def draw(rng, family, room, whole):
    """Draws a game of `family` in `room`; None where the room has no such game."""
    ability, appliance = FAMILIES[family]
    kinds = sorted({kind for _, kind in room.receptacles})
    look, copies = family == "look_at_obj_in_light", 2 if family == "pick_two_obj_and_place" else 1
    stands = [kind for kind in LAMP_STANDS if kind in kinds]
    if (appliance and appliance not in kinds) or (look and not ("DeskLamp" in room.objects and stands)):
        return None

    # Target and goal. A target never starts in a receptacle of the goal's type, so no game is won before it begins.
    options = {}
    for target in room.objects:
        homes = [kind for kind in kinds if target in CAN_CONTAIN[kind]]
        allowed = not ability or target in constants.VAL_ACTION_OBJECTS[ability]
        goals = [""] if look and homes else [kind for kind in homes if kind != appliance and len(homes) > 1]
        if target != "DeskLamp" and allowed and goals:
            options[target] = (homes, goals)
    if not options:
        return None
    target = rng.choice(sorted(options))
    homes, goals = options[target]
    goal = rng.choice(goals)
    sources = [kind for kind in homes if kind != goal]

    # Furniture: what the task needs, then others, types first so that a kitchen is more than its cabinets.
    if whole:
        chosen = list(room.receptacles)
    else:
        stand = rng.choice(stands) if look else None
        needed = [kind for kind in dict.fromkeys((goal, appliance, stand, rng.choice(sources))) if kind]
        chosen, left = [], list(room.receptacles)
        while left and len(chosen) < SMALL_RECEPTACLES:
            kind = needed.pop(0) if needed else rng.choice(sorted({kind for _, kind in left}))
            chosen.append(rng.choice([receptacle for receptacle in left if receptacle[1] == kind]))
            left.remove(chosen[-1])
        chosen.sort()
        stands = [stand]

    # Objects: the targets, sometimes one more of their type, the lamp, and others.
    def place(kind, receptacle_kinds):
        receptacles = [name for name, receptacle in chosen if receptacle in receptacle_kinds]
        return kind, rng.choice(receptacles)

    placed = [place(target, sources) for _ in range(copies + (rng.random() < 0.25))]
    if look:
        placed.append(place("DeskLamp", stands))
    present = {kind for _, kind in chosen}
    others = [kind for kind in room.objects if kind not in (target, "DeskLamp") and any(kind in CAN_CONTAIN[r] for r in present)]
    if whole:
        wanted = [kind for kind in others for _ in range(rng.randint(1, 2))]
    else:
        wanted = [rng.choice(others) for _ in range(rng.randint(4, 6) - len(placed))] if others else []
    placed += [place(kind, [r for r in present if kind in CAN_CONTAIN[r]]) for kind in wanted]
    objects = tuple((f"{kind}|+{i:02d}.00|+01.00|+00.00", kind, name) for i, (kind, name) in enumerate(placed))

    template = rng.choice(gdict[family]["templates"])
    sentence = template.format(obj=target.lower(), recep=goal.lower(), toggle="desklamp")
    return Description(family, room.scene, target, goal, sentence, tuple(chosen), objects)


def problem(game):
    """The PDDL problem of a game."""
    object_types = {kind for _, kind, _ in game.objects}
    receptacle_types = {kind for _, kind in game.receptacles}
    # The domain's actions name these types whether the room has them or not.
    declared_objects = sorted(object_types | {"Knife", "ButterKnife"})
    declared_receptacles = sorted(receptacle_types | {"SinkBasin", "Microwave", "Fridge"})
    where = {name: f"loc|{i}|0|0|0" for i, (name, _) in enumerate(game.receptacles)}
    start = f"loc|{len(where)}|0|0|0"
    declarations = ["agent1 # agent", f"{start} # location"]
    declarations += [f"{kind}Type # otype" for kind in declared_objects] + [f"{kind}Type # rtype" for kind in declared_receptacles]
    declarations += [f"{name} # object" for name, *_ in game.objects]
    declarations += [f"{name} # receptacle" for name in where] + [f"{location} # location" for location in where.values()]
    facts = ["(= (total-cost) 0)", f"(atLocation agent1 {start})"]
    for name, kind in game.receptacles:
        facts += [f"(receptacleType {name} {kind}Type)", f"(receptacleAtLocation {name} {where[name]})"]
        if kind in constants.OPENABLE_CLASS_SET:
            facts.append(f"(openable {name})")
    facts += [f"(canContain {receptacle}Type {kind}Type)" for receptacle in sorted(receptacle_types) for kind in sorted(object_types)
              if kind in CAN_CONTAIN[receptacle]]
    abilities = {"cleanable": "Cleanable", "heatable": "Heatable", "coolable": "Coolable", "sliceable": "Sliceable",
                 "toggleable": "Toggleable"}
    for name, kind, receptacle in game.objects:
        facts += [f"(objectType {name} {kind}Type)", f"(inReceptacle {name} {receptacle})"]
        facts.append(f"(objectAtLocation {name} {where[receptacle]})")
        facts += [f"({predicate} {name})" for predicate, key in abilities.items() if kind in constants.VAL_ACTION_OBJECTS[key]]
        if kind != "DeskLamp":
            facts.append(f"(pickupable {name})")
        if kind in constants.MOVABLE_RECEPTACLES_SET:
            facts.append(f"(isReceptacleObject {name})")
    goal = gdict[game.family]["pddl"].format(obj=game.target, recep=game.goal, toggle="DeskLamp")
    text = "(define (problem plan)\n    (:domain alfred)\n    (:objects\n        "
    text += "\n        ".join(declarations) + "\n    )\n    (:init\n        " + "\n        ".join(facts) + "\n    )\n" + goal
    # PDDL names cannot hold these, and the package writes "#" for the dash before a type.
    for sign, word in (("|", "_bar_"), ("-", "_minus_"), ("#", "-"), ("+", "_plus_"), (".", "_dot_"), (",", "_comma_")):
        text = text.replace(sign, word)
    return text.replace("(total_minus_cost)", "(total-cost)")


def write(game, folder, domain, grammar):
    """Writes a game as the two files that ALFWorld's own data has."""
    folder.mkdir(parents=True)
    grammar = grammar.replace("UNKNOWN GOAL", game.sentence)
    logic = {"pddl_domain": domain, "grammar": grammar, "pddl_problem": problem(game), "solvable": True}
    params = {"object_target": game.target, "parent_target": game.goal, "mrecep_target": "", "object_sliced": False,
              "toggle_target": "DeskLamp" if game.family == "look_at_obj_in_light" else ""}
    about = {"task_type": game.family, "pddl_params": params, "task_id": folder.name,
             "scene": {"scene_num": game.scene, "floor_plan": f"FloorPlan{game.scene}"}}
    (folder / "game.tw-pddl").write_text(json.dumps(logic))
    (folder / "traj_data.json").write_text(json.dumps(about))


def generate(out, *, train=2000, seen=200, unseen=200, rooms="small", seed=0, progress=True):
    """Writes the games under `out` (which must not hold any yet) in equal shares of the six families and returns their paths.

    The same arguments give the same files. Raises FileExistsError where `out` has games already.
    """
    root = Path(out) / "json_2.1.1"
    if root.exists():
        raise FileExistsError(f"{root} exists already: choose another --out or delete it")
    domain, grammar = Path(ALFRED_PDDL_PATH).read_text(), Path(ALFRED_TWL2_PATH).read_text()
    splits = {"train": (train, constants.TRAIN_SCENE_NUMBERS), "valid_seen": (seen, constants.TRAIN_SCENE_NUMBERS),
              "valid_unseen": (unseen, constants.TEST_SCENE_NUMBERS)}
    paths, known = [], set()
    with tqdm(total=train + seen + unseen, desc="games", unit="game", disable=not progress) as bar:
        for split, (number, scenes) in splits.items():
            rng = random.Random(f"{seed} {split}")
            furnished = {scene: read_room(scene) for scene in scenes}
            for i in range(number):
                family = list(FAMILIES)[i % len(FAMILIES)]
                kinds = constants.GOALS_VALID[family]
                candidates = [scene for scene in scenes if any(scene in constants.SCENE_TYPE[kind] for kind in kinds)]
                game = None
                while game is None or game in known:
                    game = draw(rng, family, furnished[rng.choice(candidates)], rooms == "whole")
                known.add(game)
                goal = game.goal or "DeskLamp"
                folder = root / split / f"{family}-{game.target}-None-{goal}-{game.scene}" / f"trial_{i:05d}"
                write(game, folder, domain, grammar)
                paths.append(str(folder / "game.tw-pddl"))
                bar.update()
    return paths


def ensure(out=None):
    """The default data set: makes it where it is missing and returns its folder. Written to a temporary folder and renamed, so what is
    there is always whole; of several processes at once the first to finish wins."""
    out = Path(out or DEFAULT_DATA)
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            generate(temporary)
            temporary.chmod(0o755)
            os.rename(temporary, out)
        except OSError:
            if not out.exists():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return str(out)


def read_params(path):
    """The pddl_params of a game file (object_target, parent_target ...) as lower-case strings."""
    about = json.loads((Path(path).parent / "traj_data.json").read_text())
    return {key: str(value).lower() for key, value in about["pddl_params"].items()}


Fact = namedtuple("Fact", "name names")


class Expert:
    """The package's handcoded expert, fed from the text that any player sees instead of from the engine's list of facts.

        expert = Expert(game_file, feedback)              # the first feedback
        command = expert.act(feedback, admissible)        # then one command per feedback
        expert.subgoal                                    # what that command is for: ("find", "apple")

    The package's own version never sees that an object was put down (it waits for "put ...", the command has become "move ..."), which
    makes it fail on two objects: here it is told the old word.
    """

    def __init__(self, game_file, feedback, seed=0):
        handcoded_expert.random = random.Random(seed)  # it picks among equal objects, and anything when it is stuck
        self.agent = HandCodedTWAgent(max_steps=1000)
        self.agent.reset(str(game_file))
        self.agent.observe("Welcome " + feedback)  # how it knows a first feedback; the greeting may be gone
        self.held, self.inside, self.states, self.last = None, {}, {}, None

    @property
    def subgoal(self):
        policy = self.agent.policy
        goal = policy.subgoals[min(policy.subgoal_idx, len(policy.subgoals) - 1)]
        return goal["action"], goal["param"]

    def act(self, feedback, admissible):
        """The next command, always an admissible one. Raises handcoded_expert.HandCodedAgentTimeout after 1,000 of them."""
        if self.last is None:
            feedback = "Welcome " + feedback  # it looks for the greeting here, too, and wanders about without it
        else:
            self.follow(feedback)
        facts = [Fact("inreceptacle", pair) for pair in self.inside.items()]
        facts += [Fact(state, (name,)) for name, state in self.states.items()]
        facts += [Fact("holds", ("agent", self.held))] if self.held else []
        state = {"feedback": feedback, "admissible_commands": admissible, "facts": facts}
        command = self.agent.act(state, 0, False, (self.last or "look").replace("move ", "put ", 1))
        self.last = command if command in admissible else "look"
        return self.last

    def follow(self, feedback):
        """Updates what is held, where, and its state from the answer to the last command."""
        if feedback.startswith("Nothing happens"):
            return
        verb, *words = self.last.split()
        if verb in ("take", "move"):
            thing, receptacle = " ".join(words[:2]), " ".join(words[3:])
            self.held = thing if verb == "take" else None
            self.inside.pop(thing, None)
            if verb == "move":
                self.inside[thing] = receptacle
        elif verb in ("heat", "cool", "clean"):
            self.states[" ".join(words[:2])] = {"heat": "ishot", "cool": "iscool", "clean": "isclean"}[verb]


def play(game, path, limit=500):  # a kitchen with 27 drawers takes the expert 150 steps
    """Plays one game with the expert; the number of steps it took, or None when it was not won within `limit` steps."""
    feedback, admissible = game.start(str(path))
    expert = Expert(path, feedback)
    for step in range(1, limit + 1):
        feedback, admissible, won, done = game.step(expert.act(feedback, admissible))
        if won:
            return step
    return None


def play_at_random(game, path, limit, rng):
    """Plays one game with random admissible commands; whether it was won within `limit` steps."""
    _, admissible = game.start(str(path))
    for _ in range(limit):
        _, admissible, won, _ = game.step(rng.choice(admissible))
        if won:
            return True
    return False


def check_games(paths, progress=True, limit=20):
    """Plays every game with the expert, and at random for comparison -> (steps of the expert, won at random within `limit` steps), one
    per game. ValueError at the first game that the expert does not win."""
    from alfworld_fast import Game  # here, so that writing games needs no engine

    game, rng, steps, lucky = Game(), random.Random(0), [], []
    try:
        for path in tqdm(paths, desc="expert", unit="game", disable=not progress):
            steps.append(play(game, path))
            if steps[-1] is None:
                raise ValueError(f"the expert did not win {path}")
            lucky.append(play_at_random(game, path, limit, rng))
    finally:
        game.close()
    return steps, lucky


def report(paths, limit=20):
    """Checks the games and prints what the expert and chance reach, by split and family."""
    steps, lucky = check_games(paths, limit=limit)
    print(f"The expert won all {len(paths)} games. Within {limit} steps:")
    groups = {}
    for path, n, luck in zip(paths, steps, lucky):
        split, family = Path(path).parts[-4], Path(path).parts[-3].split("-")[0]
        for group in ((split, "all"), (split, family)):
            groups.setdefault(group, []).append((n, luck))
    for (split, family), played in groups.items():
        number = len(played)
        print(f"  {split:13} {family:31} {number:5} games, expert {sum(n <= limit for n, _ in played) / number:6.1%}, "
              f"its mean steps {sum(n for n, _ in played) / number:4.1f}, random {sum(luck for _, luck in played) / number:6.1%}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(DEFAULT_DATA), help="folder to write to (default: %(default)s)")
    parser.add_argument("--train", type=int, default=2000, help="games of the train split (default: %(default)s)")
    parser.add_argument("--seen", type=int, default=200, help="held-out games in train rooms (default: %(default)s)")
    parser.add_argument("--unseen", type=int, default=200, help="held-out games in other rooms (default: %(default)s)")
    parser.add_argument("--rooms", choices=["small", "whole"], default="small", help="size of the rooms (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other games (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="also play each game with the expert and at random (0.1 s a small game)")
    args = parser.parse_args()
    try:
        paths = generate(args.out, train=args.train, seen=args.seen, unseen=args.unseen, rooms=args.rooms, seed=args.seed)
        print(f"{len(paths)} games in {args.out}")
        if args.check:
            report(paths)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
