"""ALFWorld games on TextWorld's PDDL engine, without doing the same work again and again.

    game = Game()                                # one live slot
    feedback, admissible = game.start("json_2.1.1/train/.../game.tw-pddl")
    feedback, admissible, won, done = game.step("go to fridge 1")
    game.close()

What the agent sees is what `alfworld`'s own `AlfredTWEnv` shows, character for character: `Game(fast=False)` is that
engine (`PddlEnv` inside `AlfredDemangler` and `AlfredInfos`), and the tests compare the two step by step. The first
feedback is left as it is, with its line "-= Welcome to TextWorld, ALFRED! =-" and the task sentence at its end: that
is the text agents on real ALFWorld get.

The planner library (fast-downward, C++) stays the referee: it says which actions apply, what they change and when the
goal is reached, in microseconds. The stock engine spends its time around it, and here that work is done once:

| stock engine                                                       | here                                            |
|--------------------------------------------------------------------|-------------------------------------------------|
| parses domain and text grammar at each start                       | once per process, plus one task sentence a game |
| translates the PDDL problem four times for load and reset          | once per game; remembered for the last `WORLDS` |
| parses the command template of every operator in every step        | one dictionary of commands per game             |
| parses queries and expressions of the grammar, copies its contexts | parsed once; plain dictionaries                 |
| copies a 34 MB library to disk per environment, never closes it    | loadable part (1 MB), one per live game         |

Nothing in textworld is changed: this file uses its parsers and its translator and replaces the loop around them. That
is proven for the versions in `PROVEN`; with others `Game` uses the stock engine and says so once.
"""

import collections
import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import json
import os
import re
import struct
import sys
import tempfile
import zlib

import fast_downward
from alfworld.agents.utils.misc import Demangler
from textworld.envs.pddl import logic as pddl_logic
from textworld.envs.pddl import textgen
from textworld.generator.game import EntityInfo
from textworld.logic import Rule, Type, TypeHierarchy

PROVEN = {"textworld": "1.7.0", "fast-downward-textworld": "20.6.4"}
WORLDS = 256  # translated games remembered per process: about 0.4 MB each for a whole room, much less for a small one


class Game:
    """One live game slot: `start` any number of games in it, one after the other.

    fast: False takes the stock engine. `self.fast` says which one it is: False too where the versions are not `PROVEN`.

    A slot holds one planner library, which has global state and is never shared by two live games. `close` hands it to
    the next `Game` of the process, so a process loads as many as were ever live at once. They are not unloaded: the
    copies share one registry (a unique symbol) that keeps pointers into each of them, and a process that closes one
    crashes at its exit.
    """

    _idle = {True: [], False: []}  # engines whose game was closed

    def __init__(self, fast: bool = True):
        self._engine = None
        self.fast = bool(fast) and _proven()
        idle = Game._idle[self.fast]
        self._engine = idle.pop() if idle else (_Engine if self.fast else _StockEngine)()

    def start(self, game_file: str) -> tuple[str, list[str]]:
        """Load a `game.tw-pddl` and return its first (feedback, admissible commands)."""
        return self._engine.start(os.fspath(game_file))

    def step(self, command: str) -> tuple[str, list[str], bool, bool]:
        """Send a command: (feedback, admissible commands, won, done). An unknown one gives "Nothing happens."."""
        return self._engine.step(command)

    def close(self) -> None:
        """End the game and free its memory; the object cannot be used afterwards. Closing twice is fine."""
        if self._engine is not None:
            self._engine.clear()
            Game._idle[self.fast].append(self._engine)
            self._engine = None

    __del__ = close


@functools.cache
def _proven() -> bool:
    found = {name: importlib.metadata.version(name) for name in PROVEN}
    if found != PROVEN:
        print("alfworld_fast: installed", *(f"{k} {v}" for k, v in found.items()), "but proven for",
              *(f"{k} {v}" for k, v in PROVEN.items()), "only: the stock engine is used, same games but slower",
              file=sys.stderr)
    return found == PROVEN


class _StockEngine:
    """The environment that AlfredTWEnv builds, loaded again and again so that it keeps its one library."""

    def __init__(self):
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
        from textworld.envs import PddlEnv

        self.env = AlfredInfos(AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))))

    def start(self, game_file):
        self.env.load(game_file)
        state = self.env.reset()
        return state.feedback, state.admissible_commands

    def step(self, command):
        state, _, done = self.env.step(command)
        return state.feedback, state.admissible_commands, bool(state.won), bool(done)

    def clear(self):
        pass


class _Engine:
    """A planner library with the game that is loaded in it."""

    def __init__(self):
        self.library = _load_library()
        self.world = None

    def start(self, game_file):
        self.world = _world(game_file, self.library)
        self.library.load_sas(zlib.decompress(self.world.sas))
        self.facts = collections.defaultdict(set, {key: set(facts) for key, facts in self.world.facts.items()})
        return self.derive("#intro#", {}), self.admissible()

    def step(self, command):
        operator = self.valid.get(command.strip())
        feedback = "Nothing happens."
        if operator is not None:
            with contextlib.suppress(ValueError):  # as stock
                self.apply(*operator)
                action, mapping = self.world.action(self.world.operators[operator[0]][0])
                feedback = self.derive(action.feedback_rule, mapping)
        won = bool(self.library.check_goal())
        return feedback, self.admissible(), won, won

    def clear(self):
        self.library.cleanup()
        self.world = None

    def admissible(self):
        """Sorted commands; `self.valid` maps each to the first operator that has it: (id, number of effects)."""
        operators = (fast_downward.Operator * self.library.get_applicable_operators_count())()
        self.library.get_applicable_operators(operators)
        self.valid = {}
        for operator in operators:
            self.valid.setdefault(self.command(operator), (operator.id, operator.nb_effect_atoms))
        return sorted(self.valid)

    def command(self, operator):
        known = self.world.operators.get(operator.id)
        if known is None or known[1] is None:
            name = operator.name
            action, mapping = self.world.action(name)
            command = self.derive(action.template, mapping).format(**self.world.names)
            fixed = all(map(_fixed, _symbols(action.template)))
            self.world.operators[operator.id] = name, command if fixed else None
            return command
        return known[1]

    def apply(self, operator, n_effects):
        effects = (fast_downward.Atom * n_effects)()
        self.library.apply_operator(operator, effects)
        for effect in effects:
            predicate, arguments = _parse_atom(effect.name)
            types = tuple(self.world.type_of[a] for a in arguments)
            opposite = predicate[4:] if predicate.startswith("not_") else "not_" + predicate
            self.facts[opposite, types].discard(arguments)
            self.facts[predicate, types].add(arguments)

    # -- text: the context-sensitive grammar of textworld.envs.pddl.textgen, without its copies --

    def derive(self, text, mapping):
        """Text of a grammar expression. mapping: {(placeholder, type): object}, fixed by the action."""
        return self.expand(_symbols(text), mapping, self.variables(mapping))

    def variables(self, mapping):
        entities = self.world.entities
        return {name: entities[value] for (name, _), value in mapping.items()}

    def expand(self, symbols, mapping, variables):
        return "".join([self.expand_one(symbol, mapping, variables) for symbol in symbols])

    def expand_one(self, symbol, mapping, variables):
        match symbol:
            case textgen.TerminalSymbol():
                return str(symbol.symbol)
            case textgen.NonterminalSymbol():
                for rule in self.world.rules[str(symbol)]:
                    if not rule.condition or any(True for _ in self.matches(rule.condition, mapping)):
                        return self.expand(rule.rhs, mapping, variables)
                raise IndexError(f"no rule of the grammar applies to #{symbol}#")
            case textgen.EvalSymbol():
                return str(eval(_compiled(symbol.expression), {}, variables))
            case textgen.ConditionalSymbol():
                return "".join(self.alternatives(symbol, mapping, variables))
            case textgen.ListSymbol():
                items = self.alternatives(symbol.symbol, mapping, variables)
                if not items:
                    return self.expand_one(textgen.NonterminalSymbol("list_empty"), mapping, variables)
                *first, last = items
                if not first:
                    return last
                comma, end = (self.expand_one(textgen.NonterminalSymbol(s), mapping, variables)
                              for s in ("list_separator", "list_last_separator"))
                return comma.join(first) + end + last
        raise NotImplementedError(f"Unknown symbol: {type(symbol)}")

    def alternatives(self, symbol, mapping, variables):
        """Texts of `{expression | given}`: one per way in which the facts satisfy the query `given`."""
        if not symbol.given:
            return [self.expand_one(symbol.expression, mapping, variables)]
        return [self.expand_one(symbol.expression, found, {**variables, **self.variables(found)})
                for found in self.matches(symbol.given, mapping)]

    def matches(self, query, mapping):
        """All extensions of mapping under which every predicate of the query is a fact, in textworld's order."""
        return self.extend(_query(query), dict(mapping), set(mapping.values()))

    def extend(self, predicates, mapping, used):
        if not predicates:
            yield dict(mapping)
            return
        (name, parameters), *rest = predicates
        fresh = [p for p in parameters if p not in mapping]
        for types in self.world.subtypes(tuple(t for _, t in parameters)):
            for arguments in sorted(self.facts.get((name, types), ())):
                for parameter, argument in zip(parameters, arguments, strict=True):
                    bound = mapping.get(parameter)
                    if bound is None:
                        if argument in used:  # two placeholders never stand for the same object
                            break
                        mapping[parameter] = argument
                        used.add(argument)
                    elif bound != argument:
                        break
                else:
                    yield from self.extend(rest, mapping, used)
                for parameter in fresh:
                    used.discard(mapping.pop(parameter, None))


class _World:
    """All that is the same whenever a game is played: its translation, names and commands. Shared by slots."""

    def __init__(self, data, library):
        self.actions, self.rules = _grammar(data["grammar"])
        with _translator():
            task, sas = fast_downward.pddl2sas(data["pddl_domain"], data["pddl_problem"])
        self.sas = zlib.compress(sas.encode(), 1)  # 0.7 MB for a whole room, a twentieth of it compressed
        self.parameters = {a.name: [(p.name.strip("?"), p.type_name) for p in a.parameters] for a in task.actions}
        self.type_of = {sys.intern(o.name): o.type_name for o in task.objects}
        self.types = TypeHierarchy()
        for t in task.types:
            with contextlib.suppress(ValueError):  # named twice
                self.types.add(Type(t.name, t.supertype_names))
        self._subtypes = {}
        self.operators = {}  # id -> (name with arguments, command or None where its text depends on the facts)

        library.load_sas(sas.encode())
        atoms = (fast_downward.Atom * library.get_state_size())()
        library.get_state(atoms)
        self.facts = collections.defaultdict(set)  # {(predicate, types): {arguments}} at the start
        for predicate, arguments in filter(None, [*map(_fact, task.init), *(_parse_atom(atom.name) for atom in atoms)]):
            if not predicate.startswith("not_"):
                self.facts[predicate, tuple(self.type_of[a] for a in arguments)].add(arguments)

        named = {a for facts in self.facts.values() for arguments in facts for a in arguments}
        self.entities = {a: EntityInfo(a, self.type_of[a]) for a in named}
        demangler = Demangler(game_infos=self.entities, shuffle=False)
        for info in self.entities.values():
            info.name = demangler.demangle_alfred_name(info.id)
            info.definite, info.indefinite = "the", "a"
        self.names = {a: info.name for a, info in self.entities.items()}

    def action(self, operator):
        """ "openobject agent1 loc1 fridge1" -> (its action in the grammar, {(placeholder, type): object}) """
        name, *arguments = operator.split()
        return self.actions[name], dict(zip(self.parameters[name], arguments, strict=False))

    def subtypes(self, types):
        """The tuples of types that may stand for these, in textworld's order."""
        if types not in self._subtypes:
            closure = self.types.multi_subtypes([self.types.get(t) for t in types])
            self._subtypes[types] = [tuple(t.name for t in ts) for ts in closure]
        return self._subtypes[types]


def _fact(atom):
    """An atom of the translated problem as (predicate, arguments), None for those that textworld leaves out."""
    pddl = fast_downward.translate.pddl
    if isinstance(atom, pddl.conditions.Atom) and atom.predicate != "=":
        return atom.predicate, tuple(map(sys.intern, atom.args))
    if isinstance(atom, pddl.f_expression.Assign) and atom.fluent.symbol != "total-cost":
        name = str(atom.expression.value)
        if not name.isdigit():
            return name, tuple(map(sys.intern, atom.fluent.args))
    return None


def _parse_atom(text):
    """ "NegatedAtom opened(fridge)" -> ("not_opened", ("fridge",)) """
    kind, rest = text.split(" ", 1)
    name, arguments = rest.split("(", 1)
    return ("not_" if kind == "NegatedAtom" else "") + name, tuple(sys.intern(a) for a in arguments[:-1].split(", ") if a)


_worlds = collections.OrderedDict()  # digest of the game file -> _World, least recently used first


def _world(game_file, library):
    with open(game_file, "rb") as f:
        text = f.read()
    key = hashlib.blake2b(text, digest_size=16).digest()
    world = _worlds.pop(key, None)
    if world is None:
        try:
            world = _World(json.loads(text), library)
        except Exception as error:  # the translator answers bad input with nearly any kind of exception
            raise ValueError(f"{game_file} is not an ALFWorld game that can be played: {error!r}") from error
    _worlds[key] = world
    while len(_worlds) > WORLDS:
        _worlds.popitem(last=False)
    return world


@contextlib.contextmanager
def _translator():
    """fast_downward's translator sets sys.argv and leaves by SystemExit on bad input: neither gets out of here.

    The garbage collector would walk the translator's hundred thousand live objects again and again: a fifth of its time.
    """
    argv, collecting = sys.argv, gc.isenabled()
    gc.disable()
    try:
        yield
    except SystemExit as error:
        raise ValueError(f"the planner cannot read its PDDL: {error}") from error
    finally:
        sys.argv = argv
        if collecting:
            gc.enable()


TASK = re.compile(r'"Your task is to: (?:[^"\\]|\\.)*"')


def _grammar(text):
    """(actions, {symbol: rules}) of a game's grammar. Games differ in the task sentence: all else is parsed once."""
    sentences = TASK.findall(text)
    if len(sentences) != 1:
        logic = _parse_grammar(text)
        return logic.actions, logic.grammar._rules
    logic = _parse_grammar(TASK.sub('"Your task is to: ."', text))
    (rule,) = logic.grammar._rules["task"]
    sentence = textgen.ProductionRule("task", _symbols(json.loads(sentences[0])), condition=rule.condition)
    return logic.actions, {**logic.grammar._rules, "task": [sentence]}


@functools.lru_cache(maxsize=8)
def _parse_grammar(text):
    return pddl_logic.GameLogic(domain="", grammar=text)


@functools.lru_cache(maxsize=1024)
def _symbols(text):
    return textgen._parse_and_convert(text, rule_name="symbols")


def _fixed(symbol):
    """Whether a symbol's text depends only on the action's objects, not on the facts."""
    return isinstance(symbol, textgen.TerminalSymbol) or (
        isinstance(symbol, textgen.ConditionalSymbol) and not symbol.given and isinstance(symbol.expression, textgen.EvalSymbol))


@functools.lru_cache(maxsize=1024)
def _compiled(expression):
    return compile(expression, "<grammar>", "eval")


@functools.lru_cache(maxsize=1024)
def _query(text):
    return [(p.name, [(q.name, q.type) for q in p.parameters]) for p in Rule.parse_conjunctive_query(text).preconditions]


def _load_library():
    """A private copy of fast-downward's library, with its file already gone from the disk.

    33 of its 34 MB are debug information, which is not mapped: only the part that the loader maps is copied. With 64 live
    games that is 70 MB instead of 2 GB of disk that stays taken, unseen, as long as the process lives.
    """
    source = fast_downward.interface.DOWNWARD_LIB_PATH
    with tempfile.TemporaryDirectory() as folder:
        small = os.path.join(folder, "libdownward.so")
        with open(source, "rb") as f, open(small, "wb") as g:
            g.write(f.read(_loadable_size(source)))
        try:
            fast_downward.interface.DOWNWARD_LIB_PATH = small  # load_lib loads a copy of what this names
            return fast_downward.load_lib()
        finally:
            fast_downward.interface.DOWNWARD_LIB_PATH = source


def _loadable_size(path):
    """Bytes of an ELF64 file up to the end of its last program segment; all of any other file."""
    with open(path, "rb") as f:
        header = f.read(64)
        if header[:6] != b"\x7fELF\x02\x01":  # 64 bit, little endian
            return -1
        table, entry, entries = struct.unpack("<Q14xHH", header[32:58])
        f.seek(table)
        segments = [struct.unpack_from("<8xQ16xQ", f.read(entry)) for _ in range(entries)]  # (offset in the file, size in the file)
    return max(offset + size for offset, size in segments)
