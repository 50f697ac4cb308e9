"""Environments: what a task is, how a state becomes a prompt and a reply an action, and the processes that play.

Add your own environment: write a class with the members of `Environment` below (`tests/example_env.py` is a whole one)
and name it on the command line: `--env module:Class`. Nothing has to be registered.

    class MyGame:
        name, role, tool_description, max_steps = "my game", "You play a game.", "Make one move.", 20
        @staticmethod
        def tasks(split, data=None): ...       # -> list[Task], in the main process: cheap
        def reset(self, task, seed): ...       # -> State, in a worker process
        def step(self, action): ...            # -> State
        def close(self): ...

This file imports neither torch nor transformers, and a game's packages only when it is played: workers start fast.
"""

import contextlib
import importlib
import json
import os
import pickle
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import Protocol

STYLES = ("think_action", "tool_call")


class UserError(ValueError):
    """Bad input. The message is one sentence with the value and the remedy; the scripts print it and exit with 2."""


def run_script(main):
    """Run the `main` of a script of one process; bad input ends it with its sentence and exit code 2."""
    try:
        main()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


@dataclass(frozen=True)
class Task:
    """One starting point. All rollouts of a group play the same task."""

    id: str  # stable and unique over all splits
    kind: str  # family, for tables: "pick_and_place_simple"
    data: dict  # whatever `reset` needs; picklable


@dataclass
class State:
    """What an environment answers to `reset` and `step`."""

    observation: str  # the environment's own text; equal texts are equal states; the first one holds the task
    admissible: list[str]  # commands that would do something now; may be empty where they cannot be listed
    task: str  # the task sentence
    reward: float = 0.0
    done: bool = False  # ended by the environment itself; step limits are the rollout's business
    success: bool = False
    score: float = 0.0  # the primary score, 0..1
    info: dict = field(default_factory=dict)


class Environment(Protocol):
    """The members an environment has. One object serves one slot and is reset many times, for different tasks."""

    name: str
    role: str  # first sentence of every prompt
    tool_description: str  # of the `env_step` tool (style tool_call)
    max_steps: int  # default step limit

    @staticmethod
    def tasks(split: str, data: str | None = None) -> list[Task]: ...

    def reset(self, task: Task, seed: int) -> State: ...

    def step(self, action: str) -> State: ...

    def close(self) -> None: ...


# ---------------------------------------------------------------- prompts


def neutral(text):
    """Text from outside, made unable to spell a control token: `<|im_end|>` -> `< |im_end|>`, `[INST]` -> `[ INST]`.

    Applies to everything shaped like a control token, so the text of a prompt does not depend on the tokenizer.
    """
    return re.sub(r"<(?=[^\s<>]+>)|\[(?=/?[A-Z_]+\])", r"\g<0> ", text)


def build_messages(style, env, *, state, history, step, history_length=2):
    """The prompt of one step as chat messages -> (messages, tools or None).

    env: the environment (class or object); state: the current State; history: (observation, action text) of all earlier
    steps, oldest first; step: counts from 0. Fixed sentences stand on lines of their own, apart from the variable text.
    """
    if style not in STYLES:
        raise UserError(f"Unknown prompt style {style!r}: choose one of {', '.join(STYLES)}.")
    task, observation = neutral(state.task), neutral(state.observation)
    commands = [neutral(command) for command in state.admissible if command != "help"]
    pairs = [(neutral(o), neutral(a)) for o, a in history[max(0, len(history) - history_length) :]]
    recent = [line for o, a in pairs for line in ("Observation:", o, "Action:", a)]
    which = "admissible command" if commands else "command"

    if style == "think_action":
        lines = [env.role, "Task:", task]
        if step > 0:
            lines += ["Steps taken so far:", str(step)]
            lines += ["Last observations and actions, oldest first:", *recent] if recent else []
            lines += ["Current step:", str(step + 1)]
        lines += ["Current observation:", observation]
        lines += ["Admissible commands:", *commands] if commands else []
        lines += [
            "Choose the next action.",
            "First reason step by step about the situation inside <think> </think> tags.",
            f"Then give exactly one {which} inside <action> </action> tags.",
        ]
        return [{"role": "user", "content": "\n".join(lines)}], None

    system = [
        env.role,
        "You act only through the tool env_step, which sends one command to the environment.",
        "Make exactly one tool call in each reply, then wait for the result.",
        f"The command must be one {which}, word for word." if commands else "The command must be one line of text.",
    ]
    example = '{"name": "env_step", "arguments": {"command": "..."}}'
    sections = [
        ("Task", [task]),
        ("Recent history", recent or ["Nothing yet."]),
        ("Current observation", [observation]),
        ("Admissible commands", commands),
        ("Instructions", [f"Reason about the situation, then choose the one {which} that brings the task forward."]),
        ("Output format", ["Your reasoning first, then one tool call:", "<tool_call>", example, "</tool_call>"]),
    ]
    user = "\n\n".join("\n".join([f"# {title}", *lines]) for title, lines in sections if lines)
    command = {"type": "string", "description": f"One {which}."}
    parameters = {"type": "object", "properties": {"command": command}, "required": ["command"]}
    function = {"name": "env_step", "description": env.tool_description, "parameters": parameters}
    messages = [{"role": "system", "content": "\n".join(system)}, {"role": "user", "content": user}]
    return messages, [{"type": "function", "function": function}]


def render(tokenizer, messages, tools=None):
    """Prompt ids of the messages by the tokenizer's own chat template, up to where the reply begins -> list of int."""
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "this tokenizer"
        remedy = "use its instruct version, or put a chat_template.jinja beside its tokenizer"
        raise UserError(f"The model {name} has no chat template: {remedy}.")
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=True)
    return [int(i) for i in (ids if isinstance(ids, list) else ids["input_ids"])]  # a dict since transformers 5


# ---------------------------------------------------------------- replies


@dataclass(frozen=True)
class Action:
    """A parsed reply. An invalid one can still have a command that is sent (think_action without its think tags)."""

    command: str | None  # None: the environment is not called
    valid: bool
    problem: str  # "" when valid, else a short fixed text that can be counted
    shown: str  # what the history shows: the command, or the end of the reply


def parse_action(style, text):
    """A reply's text -> Action. Never raises on any text.

    think_action: what stands between the first <action> and the first </action> after it, stripped and lower-cased;
    invalid without that pair, without <think> and </think>, or with a character in U+4E00-U+9FFF.
    tool_call: the first <tool_call>...</tool_call>: a JSON object named env_step with a non-empty string `command`.
    """
    command, problem = (_think_action if style == "think_action" else _tool_call)(text)
    return Action(command, not problem, problem, text[-30:] if command is None else command)


def _think_action(text):
    found = re.search(r"<action>(.*?)</action>", text, re.DOTALL)
    if not found:
        return None, "no action tags"
    problem = ""
    if "<think>" not in text or "</think>" not in text:
        problem = "no think tags"
    elif re.search("[\u4e00-\u9fff]", text):
        problem = "Chinese characters"
    return found[1].strip().lower(), problem


def _tool_call(text):
    found = re.search(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    if not found:
        return None, "no tool call"
    try:
        call = json.loads(found[1])
    except (ValueError, RecursionError):
        return None, "broken JSON in the tool call"
    if not isinstance(call, dict):
        return None, "broken JSON in the tool call"
    if call.get("name") != "env_step":
        return None, "wrong tool name"
    arguments = call.get("arguments")
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if not isinstance(command, str) or not command.strip():
        return None, "no command in the tool call"
    # JSON can spell half a surrogate pair ("\ud83d"), which no tokenizer takes.
    return command.strip().encode("utf-8", "replace").decode(), ""


def unheard(style, state, action):
    """The State after a reply without a command: the environment is not called, a step is used up, no reward."""
    if style == "think_action":
        return replace(state, observation="Nothing happens.", reward=0.0)
    note, before = "Your last reply was not carried out: ", state.observation
    if before.startswith(note):  # one note is enough
        before = before.partition("\n")[2]
    remedy = "Make exactly one env_step tool call with a command."
    return replace(state, observation=f"{note}{action.problem}. {remedy}\n{before}", reward=0.0)


# ---------------------------------------------------------------- ALFWorld


class ALFWorld:
    """Household tasks in text: ALFWorld's own games, or those made by `python -m mini.alfworld_games`."""

    name = "alfworld"
    role = "You are an expert household robot that acts in a text world."
    tool_description = "Carry out one command in the household and return what happens."
    max_steps = 50
    splits = {"train": 3553, "valid_seen": 140, "valid_unseen": 134}  # games of the published benchmark

    @staticmethod
    def tasks(split, data=None):
        """The solvable games of a split: folders with `game.tw-pddl` and `traj_data.json` under json_2.1.1/<split>.

        data: the root folder; default $ALFWORLD_DATA, else ~/.cache/alfworld; "mini": games that the project makes where they
        are missing. Sorted by path, so the order is stable.
        """
        if split not in ALFWorld.splits:
            raise UserError(f"ALFWorld has no split {split!r}: choose one of {', '.join(ALFWorld.splits)}.")
        if data == "mini":
            from mini.alfworld_games import ensure

            data = ensure()
        root = Path(data or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser() / "json_2.1.1"
        tasks = []
        for game in sorted((root / split).rglob("game.tw-pddl")):
            folder, traj_data = game.parent.relative_to(root).as_posix(), game.with_name("traj_data.json")
            # As in the published splits: no task that moves a receptacle or slices, only what is known to be solvable.
            # These are thousands of large JSON files: two fields are searched for rather than all parsed.
            if "movable" in folder or "Sliced" in folder or not re.search(rb'"solvable":\s*true', game.read_bytes()):
                continue
            kind = re.search(rb'"task_type":\s*"(\w+)"', traj_data.read_bytes() if traj_data.exists() else b"")
            if not kind:
                raise UserError(f"{traj_data} is missing or has no task_type: fetch or make the games again.")
            tasks.append(Task(folder, kind[1].decode(), {"game": str(game.absolute())}))
        if not tasks:
            raise UserError(
                f"No ALFWorld games in {root / split}: run `alfworld-download`, or make some with "
                f"`python -m mini.alfworld_games --out DIR`, and name their folder by --data or $ALFWORLD_DATA."
            )
        return tasks

    @staticmethod
    def counts(found):
        """One sentence about {split: number of games}, against the published benchmark."""
        listed = ", ".join(f"{n:,} {split}" for split, n in found.items())
        published = " / ".join(f"{ALFWorld.splits[split]:,}" for split in found)
        same = all(n == ALFWorld.splits[split] for split, n in found.items())
        return f"ALFWorld games: {listed} ({'as published' if same else f'published: {published}'})."

    def __init__(self):
        from alfworld_fast import Game  # only where games are played: listing tasks needs no alfworld package

        self.game = Game()

    def reset(self, task, seed=0):
        """Start the task's game. Nothing in it is random, so the seed changes nothing."""
        feedback, admissible = self.game.start(task.data["game"])
        feedback = feedback.replace("-= Welcome to TextWorld, ALFRED! =-", "").strip()
        self.task = feedback.partition("Your task is to: ")[2].strip()
        return State(feedback, admissible, self.task)

    def step(self, action):
        feedback, admissible, won, done = self.game.step(action)
        # Success is `won`; the engine's `done` can also come from a limit.
        return State(feedback.strip(), admissible, self.task, float(won), done or won, won, float(won))

    def close(self):
        self.game.close()


def environment(name):
    """`alfworld` or `module:Class` -> the environment class."""
    if name == "alfworld":
        return ALFWorld
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UserError(f"Unknown environment {name!r}: give alfworld, or module:Class for one of your own.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        env = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"Environment {name!r} cannot be loaded ({error}): check its name and PYTHONPATH.") from error
    members = ("name", "role", "tool_description", "max_steps", "tasks", "reset", "step", "close")
    missing = [member for member in members if not hasattr(env, member)]
    if missing:
        raise UserError(f"Environment {name!r} lacks {', '.join(missing)}: see the head of envs.py.")
    return env


# ---------------------------------------------------------------- worker processes

STARTUP = 60.0  # seconds that a new worker may take to import what it needs
GRACE = 2.0  # seconds that a worker's environments have to close


@dataclass(frozen=True)
class Failure:
    """Answer of a slot whose episode is lost: its trajectory ends here, the slot is free for the next start."""

    reason: str


class Pool:
    """Environments in worker processes, several slots to a worker; requests are answered as they come.

    Every `start` and `step` gets exactly one answer from `poll`: a State or a Failure. An exception in an environment
    fails its slot only. A worker that dies, or spends more than `deadline` seconds on one request, fails the requests
    it holds and the next `step` of its other episodes; a new worker takes its place at the next `start`.
    """

    def __init__(self, env, *, slots, workers, deadline=60.0):
        environment(env)  # its errors are the user's: raise them here
        self.env, self.slots, self.deadline = env, slots, deadline
        self.workers = [_Worker(env, deadline) for _ in range(max(1, min(workers, slots)))]
        self.playing = {}  # slot -> the worker that holds its episode
        self.answers = []  # what the next poll returns first

    def start(self, slot, task, seed):
        """Begin an episode in the slot; one that is under way there is dropped."""
        k = slot % len(self.workers)
        self.answers += self.workers[k].check()
        if self.workers[k].lost:
            self.workers[k] = _Worker(self.env, self.deadline)
        self.playing[slot] = self.workers[k]
        self.workers[k].send(slot, "reset", task, seed)

    def step(self, slot, action):
        """Send a command to the slot's episode."""
        worker = self.playing[slot]
        self.answers += worker.check()
        if worker.lost:
            self.answers.append((slot, Failure(worker.lost)))
        else:
            worker.send(slot, "step", action)

    def poll(self, timeout=0.0):
        """What was answered, [(slot, State or Failure)]; waits up to timeout seconds for the first, if any is due."""
        until = time.monotonic() + timeout
        while True:
            answers, self.answers = self.answers, []
            busy = {worker.conn: worker for worker in self.workers if worker.waiting}
            now = time.monotonic()
            pause = 0.0 if answers or not busy else min([until, *(w.overdue_at for w in busy.values())]) - now
            for conn in connection.wait(list(busy), max(0.0, pause)):
                answers += busy[conn].read()
            for worker in busy.values():
                if worker.waiting and worker.overdue_at <= time.monotonic():
                    answers += worker.end(f"did not answer within {worker.deadline:g} s")
            if answers or not busy or time.monotonic() >= until:
                return answers

    def close(self):
        """End all workers. No process is left when this returns."""
        for worker in self.workers:
            worker.conn.close()  # they see the end of the line, close their environments and leave
        for worker in self.workers:
            try:
                worker.process.wait(2 * GRACE)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


class _Worker:
    """The main process's side of one worker."""

    def __init__(self, env, deadline):
        ours, theirs = socket.socketpair()
        # A fresh interpreter: it imports this file and the environment, not the running script and its torch.
        serve = f"from {__name__} import _serve; _serve({theirs.fileno()}, {env!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {serve}"],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # ctrl-C is for the main process, which may want to save first
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self.conn = connection.Connection(ours.detach())
        self.deadline, self.ready, self.waiting, self.lost = deadline, False, [], ""
        self.since = time.monotonic()  # when it began what it is doing now; lost: why it no longer serves

    @property
    def overdue_at(self):
        return self.since + (self.deadline if self.ready else max(self.deadline, STARTUP))

    def send(self, slot, *request):
        assert slot not in self.waiting, f"slot {slot} has not answered yet"
        if self.ready and not self.waiting:
            self.since = time.monotonic()
        self.waiting.append(slot)
        with contextlib.suppress(OSError):  # it died a moment ago: the next read answers for it
            self.conn.send((slot, *request))

    def check(self):
        """If it has died: its last answers, and a Failure for each request it still held."""
        if self.lost or self.process.poll() is None:
            return []
        answers = self.read()
        return answers if self.lost else answers + self.end()

    def read(self):
        """All answers that have come in, [(slot, State or Failure)]; those of a dead worker are Failures."""
        answers = []
        try:
            while self.conn.poll():
                answer = self.conn.recv()
                self.since = time.monotonic()  # requests are served in order: the next one begins now
                if answer is None:
                    self.ready = True
                else:
                    self.waiting.remove(answer[0])
                    answers.append(answer)
        except (EOFError, OSError):
            answers += self.end()
        return answers

    def end(self, reason=""):
        """Kill it and bury it -> a Failure for each request it held."""
        self.process.kill()
        code = self.process.wait()
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.lost = f"the environment's worker process {reason or ended}"
        self.conn.close()
        failed, self.waiting = [(slot, Failure(self.lost)) for slot in self.waiting], []
        return failed


def _serve(fd, name):
    """A worker process: serve requests in order until the other side is gone."""
    os.set_inheritable(fd, False)
    conn = connection.Connection(fd)
    requests = queue.SimpleQueue()

    def read():
        try:
            while True:
                requests.put(conn.recv())
        except (EOFError, OSError):  # the main process closed the line or died
            requests.put(None)
            time.sleep(GRACE)
            os._exit(1)  # an environment hangs

    threading.Thread(target=read, daemon=True).start()
    env, live = environment(name), {}
    with contextlib.suppress(OSError):  # the line closes while something is sent
        conn.send(None)  # ready
        while request := requests.get():
            conn.send_bytes(_answer(env, live, *request))
    for slot in live:
        _close(live[slot])


def _answer(env, live, slot, method, *arguments):
    """Do one request on the slot's environment -> the pickled answer. live: {slot: environment object}."""
    try:
        if slot not in live:
            live[slot] = env()
        state = getattr(live[slot], method)(*arguments)
        if not isinstance(state, State):
            raise TypeError(f"{method} returned a {type(state).__name__}, not a State")
        return pickle.dumps((slot, state))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
        if slot in live:
            _close(live.pop(slot))  # its state cannot be trusted: the next start makes a new one
        return pickle.dumps((slot, Failure(reason)))


def _close(env):
    try:
        env.close()
    except Exception as error:
        print(f"closing an environment failed: {error!r}", file=sys.stderr)
