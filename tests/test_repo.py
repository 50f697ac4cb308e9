"""Promises about the repository as a whole: papers and code say the same, files stand alone, commands of README run."""

import ast
import inspect
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAPERS = [p for p in ("capo_action.py", "ccpo_context.py", "capo_critique.py") if (ROOT / p).exists()]
ALGORITHMS = PAPERS + [p for p in ("baselines.py",) if (ROOT / p).exists()]
EQUATION = r"Eq\. (\(\w+\)|\d+)"
CHOICE = r"(Differs from paper|Paper silent): (.+)"


def own_files():
    """Text files of the project: what git tracks or would track."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.splitlines()]
    else:  # an unpacked archive
        files = [p for p in ROOT.rglob("*") if not {"data", "runs", "__pycache__"} & set(p.relative_to(ROOT).parts)]
    suffixes = {".py", ".md", ".toml", ".txt", ".cfg", ".yml", ".yaml", ".sh", ""}
    return [p for p in files if p.is_file() and p.suffix in suffixes]


def readme():
    return (ROOT / "README.md").read_text()


def top_functions(source):
    """{name: its source text} of the functions at the top of a file."""
    return {f.name: ast.get_source_segment(source, f) for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)}


def section(docstring, heading):
    """The lines between a heading and the next empty line."""
    lines = inspect.cleandoc(docstring).splitlines()
    assert heading in lines, f"the docstring has no heading {heading!r}"
    body = lines[lines.index(heading) + 1 :]
    return body[: body.index("")] if "" in body else body


def test_there_is_an_algorithm():
    assert "capo_action.py" in PAPERS


# ------------------------------------------------------------------------------------------------- papers and code


@pytest.mark.parametrize("file", PAPERS)
def test_equation_index(file):
    """The docstring's table, the marks in the functions and README's table name the same pairs."""
    source = (ROOT / file).read_text()
    rows = section(ast.get_docstring(ast.parse(source)), "Equations")
    found = [re.match(rf"\s+{EQUATION}\s+(\w+)\s+\S", row) for row in rows]
    assert all(found), [row for row, ok in zip(rows, found) if not ok]
    table = {(m[1], m[2]) for m in found}
    assert len(table) == len(rows)
    marks = {(eq, name) for name, text in top_functions(source).items() for eq in re.findall(EQUATION, text)}
    assert marks == table


def readme_equations():
    pairs, inside = set(), None
    for line in readme().splitlines():
        cells = [c.strip().replace("`", "") for c in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|"):
            inside = None
        elif {"Equation", "Function"} <= set(cells):
            inside = cells.index("Equation"), cells.index("Function")
        elif inside and not set(line) <= set("|-: "):
            name = cells[inside[1]].split("(")[0].strip().split(".")[-1]
            pairs |= {(eq, name) for eq in re.findall(EQUATION, cells[inside[0]])}
    return pairs


def test_readme_has_the_same_equation_table():
    expected = set()
    for file in PAPERS:
        rows = section(ast.get_docstring(ast.parse((ROOT / file).read_text())), "Equations")
        expected |= {re.match(rf"\s+{EQUATION}\s+(\w+)", row).groups() for row in rows}
    assert readme_equations() == expected


@pytest.mark.parametrize("file", PAPERS)
def test_choices_of_our_own_are_listed(file):
    """`# Differs from paper:` and `# Paper silent:` in the code are, word for word, the docstring's list."""
    source = (ROOT / file).read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [t.string.removeprefix("#").strip() for t in tokens if t.type == tokenize.COMMENT]
    code = {c for c in comments if re.match(CHOICE, c)}
    listed = [line.strip().removeprefix("- ") for line in section(ast.get_docstring(ast.parse(source)), "Choices")]
    assert code and all(re.match(CHOICE, line) for line in listed)
    assert code == set(listed) and len(listed) == len(set(listed))


@pytest.mark.parametrize("file", ALGORITHMS)
def test_every_setting_has_a_line_with_its_source(file):
    text = (ROOT / file).read_text()
    config = next(c for c in ast.parse(text).body if isinstance(c, ast.ClassDef) and c.name == "Config")
    lines = text.splitlines()
    for field in config.body:
        if isinstance(field, ast.AnnAssign):
            assert re.search(r"  # \w.* \[(paper|authors|ours)", lines[field.end_lineno - 1]), lines[field.lineno - 1]


# ------------------------------------------------------------------------------------------------- one file alone

ONLY_THIS = """
import builtins, runpy, sys
real = builtins.__import__
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    if (globals or {}).get("__name__") == "__main__" and globals.get("__file__") == sys.argv[1]:
        if level or name.split(".")[0] not in {*sys.stdlib_module_names, "torch", "numpy"}:
            raise ImportError(f"{name} is neither stdlib nor torch nor numpy")
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_alone(folder, file):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-B", "-c", ONLY_THIS, file]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("file", ALGORITHMS)
def test_one_file_alone_runs_its_example(file, tmp_path):
    source = (ROOT / file).read_text()
    for node in ast.walk(ast.parse(source)):  # also imports that the example does not reach
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += ["." * node.level + (node.module or "")] if isinstance(node, ast.ImportFrom) else []
        assert {n.split(".")[0] for n in names} <= {*sys.stdlib_module_names, "torch", "numpy"}, names
    shutil.copy(ROOT / file, tmp_path)
    done = run_alone(tmp_path, file)
    assert done.returncode == 0 and not done.stderr, done.stderr
    if file in ("capo_action.py", "ccpo_context.py"):  # the per-action table of two small trajectories
        rows = [line for line in done.stdout.splitlines() if re.match(r"\s*\d+\s+\d+\s", line)]
        assert len({row.split()[0] for row in rows}) == 2 and len(rows) >= 4
    assert len(done.stdout.splitlines()) > 5 and "nan" not in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == [file]


def test_a_refused_import_is_really_refused(tmp_path):
    (tmp_path / "other.py").write_text("import os, pytest\n")
    done = run_alone(tmp_path, "other.py")
    assert done.returncode == 1 and "pytest is neither" in done.stderr


# ------------------------------------------------------------------------------------------------- the repository


def test_the_repository_speaks_of_itself_alone():
    """No registry hosts, no paths of one machine, no documents or people that a reader of the repository cannot see."""
    words = [
        "py" + "pi.org", "python" + "hosted", "npm" + "js.", "conda" + "-forge", ".." + "/shared",
        "helper " + "session", "this " + "session", "this " + "workplace", "issues " + "show", "/tmp/" + "bash",
        *(name + ".md" for name in ("SP" + "EC", "DE" + "SIGN", "FA" + "CTS", "FAU" + "LTS", "CON" + "TRACT", "BASE" + "LINES")),
    ]  # fmt: skip
    machine = re.compile(r"(?<![\w./~-])/(home|work|root|Users|opt|mnt|srv)/\w")
    unfinished = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    faults = []
    for path in own_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            bad = [w for w in words if w.lower() in line.lower()]
            bad += [m[0] for m in (machine.search(line), unfinished.search(line)) if m]
            faults += [f"{path.relative_to(ROOT)}:{number}: {b}" for b in bad]
    assert not faults, "\n".join(faults)


def test_no_drawer_for_everything():
    assert not [p for p in own_files() if p.name in ("util" + "s.py", "helpers.py", "common.py", "misc.py")]


def test_readme_names_every_source_file():
    text = readme()
    missing = [p.name for p in own_files() if p.suffix == ".py" and p.parent == ROOT and p.name not in text]
    assert not missing


def flags():
    """Every flag of train.py: its add_argument calls, and the fields of Settings and of each Config."""
    found = {}
    for file in ["train.py", *ALGORITHMS]:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                for arg in node.args:
                    if isinstance(arg, ast.Constant) and str(arg.value).startswith("--"):
                        found[arg.value.removeprefix("--").replace("-", "_")] = file
            if isinstance(node, ast.ClassDef) and node.name in ("Settings", "Config"):
                found |= {f.target.id: file for f in node.body if isinstance(f, ast.AnnAssign)}
    return found


def test_every_flag_is_read():
    """As an attribute of the settings somewhere in the code; copying all fields at once is not reading them."""
    assert len(flags()) > 20
    read = set()
    for path in own_files():
        if path.suffix != ".py" or "tests" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and isinstance(node.args[1], ast.Constant):
                read.add(node.args[1].value)
    unread = sorted(f"--{name} ({file})" for name, file in flags().items() if name not in read)
    assert not unread, f"nothing reads {unread}"


def test_the_mutants_fit_the_files_as_they_are():
    """In a process of its own, as mutants.py sets threads for its whole process. What the mutants do is `python tests/mutants.py`."""
    code = "import mutants; print([c for f in mutants.MUTANTS for c in mutants.complaints(f, (mutants.ROOT / f).read_text())])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------- README's commands

TOOLS = ("python", "torchrun")
NOT_HERE = ("tests/mutants.py", "-m pytest")  # CI runs these by themselves


def readme_commands():
    """Commands of README's shell blocks that this machine can run: installing, downloading and GPU runs are left out."""
    commands = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```\s*$", readme(), re.MULTILINE | re.DOTALL):
        if language not in ("", "bash", "sh", "shell", "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.sub(r"\s+#.*|^\s*#.*|^\$ ", "", line).split("&&"):
                words = part.split()
                if words and words[0] in TOOLS and not any(n in part for n in NOT_HERE):
                    commands.append(part.strip())
    commands = [c for c in commands if "nproc_per_node=8" not in c and "--nnodes" not in c and "--preset paper" not in c]
    return list(dict.fromkeys(commands))


def test_readme_has_commands():
    commands = readme_commands()
    assert any("train.py --algo capo_action" in c for c in commands)
    assert any("eval.py" in c for c in commands)


def test_readme_commands_use_flags_that_exist():
    known = {}
    for command in readme_commands():
        script = next((w for w in shlex.split(command) if w.endswith(".py")), None)
        if script is None:
            continue
        known.setdefault(script, (ROOT / script).read_text())
        used = re.findall(r"--([\w-]+)", command.split(script, 1)[1])
        for flag in used:
            assert flag.replace("-", "_").removeprefix("no_") in flags() or f'"--{flag}"' in known[script], f"{script} --{flag}"


@pytest.mark.slow
def test_readme_commands_run(tmp_path):
    """In a copy of the tree, in README's order, so that what one command writes is there for the next.

    Training is shortened to two iterations; RUN_DIR, or a path under runs/, stands for the folder of the last run."""
    copy = tmp_path / "copy"
    away = shutil.ignore_patterns(".git", "runs", "data", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, copy, ignore=away)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    for command in readme_commands():
        runs = sorted((copy / "runs").glob("*"), key=lambda p: p.stat().st_mtime) if (copy / "runs").is_dir() else []
        words = shlex.split(command)
        if "train.py" in words and "--resume" not in words:
            words += ["--iterations", "2"]
        elif runs:
            last = runs[-1].relative_to(copy).as_posix()
            words = [re.sub(r"^(RUN_DIR|runs/[^/]+)", last, w) for w in words]
            saved = sorted(p.name for p in (runs[-1] / "checkpoints").glob("[0-9]*"))
            words = [re.sub(r"/checkpoints/\d+", f"/checkpoints/{saved[-1]}", w) if saved else w for w in words]
        if words[0] == "python":
            words[0] = sys.executable
        done = subprocess.run(words, cwd=copy, env=env, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
