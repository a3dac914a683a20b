"""No source file uses pickle, runs code from text, calls a shell or holds an absolute path.

The tokens of every file are searched.
"""

import io
import re
import token
import tokenize

import pytest

from paths import ROOT

FILES = sorted(
    p for folder in ("src", "examples", "benchmarks") for p in (ROOT / folder).rglob("*.py")
)
BARE = {
    "eval",
    "exec",
    "compile",
    "__import__",
}  # refused as calls by that name; x.eval() is a method
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
MEMBERS = {
    ("torch", "load"),
    ("torch", "save"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("os", "system"),
    ("os", "popen"),
}
ARGUMENTS = {("shell", "True"), ("allow_pickle", "True"), ("weights_only", "False")}
ABSOLUTE = re.compile(
    r"""^[rbfuRBFU]*["']+(/(home|root|tmp|work|usr|var|etc|mnt|Users|opt)\b|[A-Za-z]:\\|~/)"""
)


def findings(source):
    """[(line, what)]"""
    kinds = (token.NAME, token.OP, token.STRING, token.NUMBER)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type in kinds]
    texts = ["", *(t.string for t in tokens), "", ""]
    found = []
    for i, t in enumerate(tokens, start=1):
        before, here, after, then = texts[i - 1], texts[i], texts[i + 1], texts[i + 2]
        if t.type == token.STRING:
            if ABSOLUTE.match(here):
                found.append((t.start[0], here))
        elif here in BARE and after == "(" and before not in (".", "def"):
            found.append((t.start[0], here + "("))
        elif here in MODULES and before in ("import", "from", ",", "", "\n"):
            found.append((t.start[0], here))
        elif (here, then) in MEMBERS and after == "." and before != ".":
            found.append((t.start[0], f"{here}.{then}"))
        elif (here, then) in ARGUMENTS and after == "=":
            found.append((t.start[0], f"{here}={then}"))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_source_file_is_clean(path):
    assert findings(path.read_text(encoding="utf-8")) == []


def test_there_are_files_to_search():
    assert any(p.name == "rows.py" and p.parent.name == "sweeps" for p in FILES)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, pickle",
        "from pickle import loads",
        "x = torch.load(path)",
        "y = eval(text)",
        "exec(code)",
        "f = [compile(s, 'a', 'exec')]",
        "subprocess.run(a, shell=True)",
        "yaml.load(f)",
        "np.load(f, allow_pickle=True)",
        "path = '/home/someone/data'",
        'path = r"C:\\data"',
        "os.system('ls')",
    ],
)
def test_the_scanner_finds_what_it_is_for(line):
    assert findings(line + "\n")


@pytest.mark.parametrize(
    "line",
    [
        "net.eval()",
        "def exec(x): ...",
        "# torch.load(x)",
        "'see eval(x)'",
        "re.compile('a')",
        "a = b / home / 2",
    ],
)
def test_the_scanner_lets_the_innocent_pass(line):
    assert findings(line + "\n") == []
