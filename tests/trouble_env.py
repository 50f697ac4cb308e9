"""Misbehaves on command, for the tests of the worker pool. In a file of its own, so that workers start fast."""

import os
import sys
import time
from pathlib import Path

from envs import State


class Trouble:
    """Does what it is told, in a worker."""

    name, role, tool_description, max_steps = "trouble", "r", "d", 9

    @staticmethod
    def tasks(split, data=None):
        return []

    def reset(self, task, seed):
        self.log = [task.id, seed]
        return self.say("started")

    def step(self, action):
        self.log.append(action)
        verb, _, value = action.partition(" ")
        if verb == "sleep":
            time.sleep(float(value))
        elif verb == "wait":
            while not Path(value).exists():
                time.sleep(0.01)
        elif verb == "raise":
            raise ValueError(value)
        elif verb == "exit":
            os._exit(int(value))
        elif verb == "return":
            return value
        elif verb == "big":
            return self.say("x" * int(value))
        elif verb == "unpicklable":
            return State("o", [], "t", info={"f": lambda: 0})
        return self.say(verb)

    def say(self, text):
        loaded = [name for name in ("torch", "transformers", "textworld") if name in sys.modules]
        return State(text, [], "t", info={"pid": os.getpid(), "log": list(self.log), "loaded": loaded})

    def close(self):
        if "leave a note" in self.log:
            Path(self.log[0]).write_text("closed")
