"""An environment of one's own, to copy from: `python train.py --env tests.example_env:GuessNumber` trains on it."""

import random

from envs import State, Task, UserError


class GuessNumber:
    name = "guess_number"
    role = "You play a game in which you find a hidden number."
    tool_description = "Guess a number and learn whether the hidden one is higher or lower."
    max_steps = 6

    @staticmethod
    def tasks(split, data=None):
        sizes = {"train": 200, "valid_seen": 20, "valid_unseen": 20}
        if split not in sizes:
            raise UserError(f"GuessNumber has no split {split!r}: choose one of {', '.join(sizes)}.")
        draw = random.Random(split)
        tasks = []
        for n in range(sizes[split]):
            top = draw.choice((8, 12))
            tasks.append(Task(f"{split}/{n}", f"up_to_{top}", {"top": top, "hidden": draw.randint(1, top)}))
        return tasks

    def reset(self, task, seed):
        self.top, self.hidden = task.data["top"], task.data["hidden"]
        self.task = f"find the hidden number between 1 and {self.top}."
        return self._state(f"A number is hidden.\n\nYour task is to: {self.task}")

    def step(self, action):
        word, _, number = action.partition(" ")
        if word != "guess" or not number.isdecimal():
            return self._state("Nothing happens.")
        if int(number) == self.hidden:
            return self._state(f"Yes, it is {number}.", won=True)
        return self._state(f"It is {'higher' if int(number) < self.hidden else 'lower'} than {number}.")

    def _state(self, observation, won=False):
        commands = [f"guess {n}" for n in range(1, self.top + 1)]
        return State(observation, commands, self.task, reward=float(won), done=won, success=won, score=float(won))

    def close(self):
        pass
