"""Settings files: what is read, what is refused and in which words, and what is written.

Nothing in a file can run code, hang or fill the memory.
"""

import json
import math
import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from coadjoint.errors import CoadjointError, ConfigError, MissingError, StorageError
from coadjoint.training import settings
from paths import read_table
from sampling import later
from work import TooMuch, counted

FORMATS = ("yaml", "json", "toml")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of its own, so that files have short names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(name, content):
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return settings.load(name)


def same(a, b):
    """Equal, with 1, 1.0 and True told apart, and 0.0 from -0.0."""
    return repr(a) == repr(b)


# what is read

READ = [
    ("yaml", "lr: 1e-3", {"lr": 0.001}),
    (
        "yaml",
        "a: [1E3, .5, +1.0e-3, -2e+4, 1., 0.5]",
        {"a": [1000.0, 0.5, 0.001, -20000.0, 1.0, 0.5]},
    ),
    (
        "yaml",
        "a: [0, -0, +7, 9223372036854775807, -9223372036854775808]",
        {"a": [0, 0, 7, 2**63 - 1, -(2**63)]},
    ),
    (
        "yaml",
        "a: [true, False, TRUE, null, ~, Null]\nb:",
        {"a": [True, False, True, None, None, None], "b": None},
    ),
    (
        "yaml",
        "a: ['no', \"012\", '1:30', '2020-01-01', '', '~']",
        {"a": ["no", "012", "1:30", "2020-01-01", "", "~"]},
    ),
    (
        "yaml",
        "a: [elman, log-ratio, 3rd, v1.0, a:b, 1e, 1.2.3]",
        {"a": ["elman", "log-ratio", "3rd", "v1.0", "a:b", "1e", "1.2.3"]},
    ),
    ("yaml", "a: |\n  no\nb: >\n  12\n", {"a": "no\n", "b": "12\n"}),
    ("yaml", "# c\n---\na: 1 # d\n...\n", {"a": 1}),
    ("yaml", "'1': x\n'<<': y z\n", {"1": "x", "<<": "y z"}),
    ("yaml", '"a\\tb\\u00e9\\U0001F600": é\n', {"a\tbé😀": "é"}),
    ("yaml", "# nothing\n", {}),
    ("yaml", "---\n", {}),
    (
        "json",
        '{"a": [1, -0.5, 1e3, "no", null, true], "b": {}}',
        {"a": [1, -0.5, 1000.0, "no", None, True], "b": {}},
    ),
    ("json", '{"\\ud83d\\ude00\\n": "\\u0041"}', {"😀\n": "A"}),
    (
        "toml",
        "a = 1\nb.c = 1e3\n[d]\ne = [true, 'x']",
        {"a": 1, "b": {"c": 1000.0}, "d": {"e": [True, "x"]}},
    ),
    ("toml", "a = 1_000\nb = 0x10\n", {"a": 1000, "b": 16}),  # TOML has one meaning for these
    *[(kind, blank, {}) for kind in FORMATS for blank in ("", "\n  \n")],
    *[
        (
            "yaml",
            "{a: " * 8 + "1" + "}" * 8,
            {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}},
        )
    ],
    *[
        (
            "json",
            '{"a": ' * 8 + "1" + "}" * 8,
            {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}},
        )
    ],
    *[("toml", "a.a.a.a.a.a.a.a = 1", {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}})],
]


@pytest.mark.parametrize(("kind", "text", "values"), READ)
def test_files_of_every_kind_are_read(here, kind, text, values):
    assert same(load(f"run.{kind}", text).values, values)
    assert same(load(f"run.{kind.upper()}", "\ufeff" + text.replace("\n", "\r\n")).values, values)


LINES = {
    "yaml": "# c\na: 1\nt:\n  u: 2\n\n  v:\n  - 3\n  - w: 4\n  s: |\n    x\n    t: 9\n  z: 5\n",
    "json": '{"a":\n1,\n"t": {\n"u": 2, "v": [3,\n{"w":\n4}], "s": "x: {[",\n\n"z": 5}\n}',
    "toml": (
        'a = 1 # [no]\n[t]\nu = 2\nv = [ # ]\n  3,\n  {z = 4} ]\ns = """\nz = 1\n"""\n'
        '"\\u007a" = 5\n[[t.m]]\n[[t.m]]\nx=1\n[t.m.y]\nk=1\n'
    ),
}
STANDS = [
    ("yaml",
        {("a",): 2, ("t",): 3, ("t", "u"): 4, ("t", "v"): 6, ("t", "v", 1): 8,
            ("t", "v", 1, "w"): 8, ("t", "z"): 12}),
    ("json",
        {("a",): 1, ("t",): 3, ("t", "u"): 4, ("t", "v"): 4, ("t", "v", 1): 5,
            ("t", "v", 1, "w"): 5, ("t", "z"): 8}),
    ("toml",
        {("a",): 1, ("t",): 2, ("t", "u"): 3, ("t", "v"): 4, ("t", "v", 1): 4, ("t", "s"): 7,
            ("t", "z"): 10}),
    ("toml",
        {("t", "m"): 11, ("t", "m", 0): 11, ("t", "m", 1): 12, ("t", "m", 1, "x"): 13,
            ("t", "m", 1, "y", "k"): 15}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "lines"), STANDS)
def test_the_line_of_every_key_is_known(here, kind, lines):
    read = load(f"run.{kind}", LINES[kind])
    assert {a: read.where(a) for a in lines} == {
        a: f"run.{kind}:{line}" for a, line in lines.items()
    }
    assert read.where(("t", "u", "deeper")) == read.where(["t", "u"])  # the nearest around it
    assert read.where(("missing",)) == read.where() == f"run.{kind}"


# what is refused: (kind, content, {line: words})

REFUSED = []
for row in read_table(__file__, "refused_settings.json"):
    problems = {int(line): words for line, words in row["problems"].items()}
    for text in row["texts"]:
        REFUSED.append((row["kind"], text, problems))
WORD = "write '{}' in quotes if you mean the word"
WORDS = ["no", "No", "NO", "off", "n", "N", "yes", "Yes", "on", "ON", "y", "Y", "None", "none"]
INTEGER = {"yaml": "a: {}", "json": '{{"a": {}}}', "toml": "a = {}"}
REFUSED += [
    *[("yaml", f"a: {word}", {1: WORD.format(word)}) for word in WORDS],
    *[
        (kind, text.format(number), {1: "beyond 64 bits"})
        for number in (2**63, -(2**63) - 1, "9" * 4000)
        for kind, text in INTEGER.items()
    ],
    ("yaml", INTEGER["yaml"].format("9" * 5000), {1: "beyond 64 bits"}),
    ("json", INTEGER["json"].format("9" * 5000), {1: "beyond 64 bits"}),
    ("toml", INTEGER["toml"].format("9" * 5000), {None: "beyond 64 bits"}),
    ("toml", "a = 0x" + "f" * 9000, {1: "beyond 64 bits"}),
]
for kind in FORMATS:
    REFUSED += [
        (kind, "a: 1".encode("utf-16"), {None: "is UTF-16 text. Save it as UTF-8."}),
        (kind, b"# x\n#\0", {2: "NUL bytes"}),
        (kind, b"# x\n# caf\xe9", {2: "byte 0xe9 is not UTF-8"}),
        (kind, b"#" * 1_000_001, {None: "the limit of 1,000,000 bytes"}),
    ]


def refusal(call, error=ConfigError):
    """The problems that are named."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value).split("\n")


@pytest.mark.parametrize(("kind", "content", "problems"), REFUSED)
def test_bad_files_are_refused_with_the_line(here, kind, content, problems):
    found = refusal(lambda: load(f"run.{kind}", content))
    assert len(found) == len(problems)
    for text, (line, words) in zip(found, problems.items(), strict=True):
        place = f"run.{kind}: " if line is None else f"run.{kind}:{line}: "
        assert text.startswith(place)
        assert re.search(words, text.removeprefix(place)), text
        assert text.endswith((".", "?"))
        assert len(text) < 300


def test_bad_settings_end_with_exit_code_2():
    assert ConfigError.exit_code == 2


def test_problems_are_listed_together(here):
    found = refusal(lambda: load("run.yaml", "".join(f"a: {n}\n" for n in ("no", "012", "1:30"))))
    assert [line.split(": ")[0] for line in found] == [f"run.yaml:{n}" for n in (1, 2, 2, 3, 3)]
    found = refusal(
        lambda: load("run.yaml", "a: no\nb: [1\nc: 2")
    )  # what was found before the file broke off
    assert [line.split(": ")[0] for line in found] == ["run.yaml:1", "run.yaml:3"]
    found = refusal(lambda: load("run.json", '{"a": 1' + ',\n"a": 1' * 25 + "}"))
    assert len(found) == 21
    assert found[-1] == "run.json: and 5 more problems."


DEEP = [
    ("yaml", "[" * 2000),
    ("yaml", "{a: " * 2000),
    ("yaml", "- " * 2000),
    ("yaml", "".join(" " * i + "a:\n" for i in range(1000))),
    ("yaml", "{a: " * 9 + "1" + "}" * 9),
    ("json", "[" * 2000),
    ("json", '{"a": ' * 2000 + "1" + "}" * 2000),
    ("json", '{"a": ' * 9 + "1" + "}" * 9),
    ("toml", "a = " + "[" * 2000 + "]" * 2000),
    ("toml", "a = " + "{b = " * 2000),
    ("toml", "a = 1\n" + "b." * 499_000 + "c = 1"),
    ("toml", "[" + "a." * 2000 + "b]"),
    ("toml", "[a.a.a.a]\nb.b.b.b.b = 1"),
    ("toml", "[a.a.a.a]\nb = [[[[[1]]]]]"),
]


@pytest.mark.parametrize(("kind", "text"), DEEP)
def test_deep_nesting_is_refused(here, kind, text):
    with counted(100_000):
        (found,) = refusal(lambda: load(f"run.{kind}", text))
    assert "nested more than 8 deep" in found
    assert found.startswith(f"run.{kind}:")


SLOW = [
    ("json", '{"a": "' + '\\"' * 490_000),
    later(("toml", 'a = """' + '\\"' * 490_000)),
    ("toml", "a = " + "'" * 990_000),
    ("toml", 'a = "\\' * 190_000),
    ("yaml", "a: " + "1" * 990_000),
    later(("yaml", 'a: "' + "\\" * 990_000)),
    ("yaml", "a: " + "0_" * 490_000 + "x: no"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "text"), SLOW)
def test_no_input_of_the_largest_size_takes_long(here, kind, text):
    """A few calls for each character, and not for each pair of them."""
    with counted(12 * len(text)):
        refusal(lambda: load(f"run.{kind}", text))


def test_work_that_grows_with_the_square_is_noticed():
    text = "x" * 2_000

    def every_pair():
        with counted(12 * len(text)):
            return [(ord(a), ord(b)) for a in text for b in text]

    with pytest.raises(TooMuch, match="more than 24,000 calls"):
        every_pair()


def test_an_alias_bomb_is_refused(here):
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
    )
    with counted(200 * len(bomb)):
        found = refusal(lambda: load("run.yaml", bomb))
    assert found[0] == "run.yaml:1: anchors and aliases are not allowed. Write out 'a0'."
    assert len(found) == 21


PAYLOADS = [
    "a: !!python/object/apply:os.makedirs {args: [MARKER]}",
    "a: !!python/object/apply:os.mkdir [MARKER]",
    "a: !!python/object/new:os.mkdir [MARKER]",
    "!!python/object/apply:os.mkdir [MARKER]",
    "a: !<tag:yaml.org,2002:python/object/apply:os.mkdir> [MARKER]",
    "%TAG !p! tag:yaml.org,2002:python/\n---\na: !p!object/apply:os.mkdir [MARKER]",
    "!!python/object/apply:os.mkdir [MARKER]: 1",
    "? !!python/object/apply:os.mkdir [MARKER]\n: 1",
    "a: !!python/object/apply:subprocess.check_call [[touch, MARKER]]",
]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_file_runs_nothing(here, payload):
    marker = here / "marker"
    found = refusal(lambda: load("run.yaml", payload.replace("MARKER", str(marker))))
    assert "tags are not allowed" in found[0]
    assert not marker.exists()


# paths


def test_paths_that_cannot_be_read_are_refused(here):
    (here / "runs").mkdir()
    os.mkfifo(here / "pipe.yaml")
    (here / "notes.txt").write_text("a: 1")
    (here / "plain").write_text("a: 1")
    (here / "run.yaml").write_text("a: 1")
    (here / "loop.yaml").symlink_to("loop.yaml")
    says = {
        "rum.yaml": "rum.yaml: does not exist. Did you mean run.yaml?",
        "rums/a.yaml": "rums/a.yaml: does not exist. Did you mean runs?",
        "run.yaml/a.yaml": "run.yaml/a.yaml: does not exist. Did you mean run.yaml?",
        "zzzzzzzzzzzz": "zzzzzzzzzzzz: does not exist. Check the name and the folder.",
        "runs": "runs: is a directory. Name a file in it.",
        "pipe.yaml": "pipe.yaml: is a pipe or device. Name a regular file.",
        os.devnull: f"{os.devnull}: is a pipe or device. Name a regular file.",
        "notes.txt": (
            "notes.txt: settings are read from .toml, .yaml, .yml, .json files; got '.txt'."
        ),
        "plain": "plain: settings are read from .toml, .yaml, .yml, .json files; got ''.",
        "a\0b.yaml": r"'a\x00b.yaml': cannot be read (embedded null byte). Check the name.",
        "x" * 300 + ".yaml": "x" * 300
        + ".yaml: cannot be read (File name too long). Check the name.",
        "loop.yaml": (
            "loop.yaml: cannot be read (Too many levels of symbolic links). Check the name."
        ),
        "a\nb": r"'a\nb': does not exist. Check the name and the folder.",
    }
    for path, words in says.items():
        assert refusal(lambda path=path: settings.load(path)) == [words]
        if "settings are read from" not in words:  # JSON on its own may have any suffix
            assert refusal(
                lambda path=path: settings.read_json(Path(path), error=StorageError), StorageError
            ) == [words]
    assert settings.load(here / "run.yaml").where(("a",)) == f"{here / 'run.yaml'}:1"


def test_a_file_that_is_too_large_is_not_read(here):
    (here / "run.yaml").touch()
    os.truncate("run.yaml", 2**40)  # a hole, more than any memory
    assert refusal(lambda: settings.load("run.yaml")) == [
        "run.yaml: is larger than the limit of 1,000,000 bytes."
    ]


def test_a_file_without_permission_is_refused(here):
    (here / "run.yaml").write_text("a: 1")
    (here / "run.yaml").chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        assert refusal(lambda: settings.load("run.yaml")) == [
            "run.yaml: no permission to read it. Change its mode or owner."
        ]
    finally:
        os.seteuid(user)


def test_without_pyyaml_the_other_formats_are_read(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert load("run.toml", "a = 1").values == load("run.json", '{"a": 1}').values == {"a": 1}
    assert "pip install pyyaml" in refusal(lambda: load("run.yaml", "a: 1"), MissingError)[0]


@pytest.mark.slow
def test_import_needs_no_yaml():
    code = "import sys, coadjoint.training.settings; sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# a flag's value


def test_words_of_a_flag_are_read_as_yaml_reads_them():
    assert same(
        [settings.parse_scalar(t) for t in ("1e-3", "12", "true", "", "tanh")],
        [0.001, 12, True, None, "tanh"],
    )
    for word, reason in {
        "no": "write 'no' in quotes",
        "012": "octal",
        "1e999": "finite",
        str(2**63): "64 bits",
    }.items():
        with pytest.raises(ValueError, match=reason):
            settings.parse_scalar(word)


# JSON alone


def test_json_is_read(here):
    value = {"a": [1, 2.5, None, True, "é"], "b": {"c": "x"}}
    text = json.dumps(value)
    Path("state").write_text(text)
    for source in (text, text.encode(), Path("state")):
        assert same(settings.read_json(source), value)
    assert same(settings.read_json("[1]"), [1])
    assert settings.read_json("null") is None
    assert settings.read_json('["\\ud83d\\ude00"]') == ["😀"]
    assert settings.read_json("[1]", max_bytes=3) == [1]
    says = {
        '{"a": 1,\n"a": 2}': r"JSON text:2: key 'a' appears twice (first at line 1). Remove one.",
        "[NaN]": (
            "JSON text:1: '0' is NaN: not a finite number. Write 'NaN' in quotes if you mean "
            "the word."
        ),
        "": "JSON text:1: column 1: not JSON: Expecting value.",
        '{"\\ud83d": 1}': (
            r"JSON text:1: a key is \ud83d: not text: it holds half of a surrogate "
            r"pair."
        ),
        "[" * 9: "JSON text:1: nested more than 8 deep. Flatten it.",
        "\ud800": "JSON text:1: byte 0xed is not UTF-8 (latin-1?). Save it as UTF-8.",
    }
    for text, words in says.items():
        assert refusal(lambda text=text: settings.read_json(text)) == [words]
    too_large = "JSON text: is larger than the limit of 2 bytes."
    assert refusal(lambda: settings.read_json("[1]", max_bytes=2)) == [too_large]
    Path("state").write_text('{"a": ')
    assert refusal(lambda: settings.read_json(Path("state"), error=StorageError), StorageError)[
        0
    ].startswith("state:1:")


# what is written

TRICKY = [
    *("no", "on", "yes", "off", "y", "n", "No", "NULL", "null", "~", "None", "true", "True",
        ".nan", "nan", "inf", "-.inf", "012", "0o12", "0x1f", "1e5", "1e-3", "1_000", "1:30",
        "2020-01-01"),
    *("", " ", " a", "a ", "#a", "a #b", "a: b", "a:", "- a", "-", "---", "...", "?", "!x", "&a",
        "*a", "<<", "=", "%a", "@a", "`a`", "|", ">"),
    *("[a]", "{a}", ",", "'", '"', "\\", "a'b", "1", "1.0", "+1", ".5", "a\nb", "\n", "\r\n", "\t",
        "\0", "\x7f", "\x85", "\xa0", "\u2028", "\ufeff", "\ufffe", "é", "日本", "😀", "e\u0301",
        "\u202e"),
]  # fmt: skip
text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(TRICKY)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.0, -0.0, 1e-5, 1e16, 1e22, 5e-324, math.nextafter(math.inf, 0), 0.1, 1.0])
    | text
)


def nested(depth):
    if depth == 0:
        return scalars
    inner = scalars | st.deferred(lambda: nested(depth - 1))
    return st.dictionaries(text, inner, max_size=4) | st.lists(inner, max_size=4)


@pytest.mark.slow
@examples(max_examples=300, deadline=None)
@given(st.dictionaries(text, nested(4), max_size=5))
def test_settings_that_are_written_are_read_back(values):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        settings.dump(values, path)
        assert same(settings.load(path).values, values)
        assert same(
            yaml.safe_load(path.read_bytes()) or {}, values
        )  # another reader understands the same
        path.with_suffix(".json").write_text(json.dumps(values))
        assert same(settings.load(path.with_suffix(".json")).values, values)


@pytest.mark.parametrize("word", TRICKY)
def test_words_that_look_like_other_things_are_read_back(here, word):
    values = {word: word, "a": [word, {word: [word]}], "b": {"c": {word: word}}}
    settings.dump(values, "run.yaml")
    assert same(settings.load("run.yaml").values, values)


def test_settings_are_written_in_one_form(here):
    settings.dump(
        {
            "task": {"name": "temporal-order", "T": 200},
            "lr": 3e-5,
            "x": (1, 2.0),
            "e": {},
            "s": "no",
            "n": None,
        },
        "run.yaml",
    )
    assert Path("run.yaml").read_text() == (
        'task:\n  name: temporal-order\n  T: 200\nlr: 3.0e-05\nx: [1, 2.0]\ne: {}\ns: "no"\n"n": '
        "null\n"
    )
    settings.dump({"a": np.float64(0.1)}, "run.yaml")
    assert Path("run.yaml").read_text() == "a: 0.1\n"
    settings.dump({}, "run.yml")
    assert settings.load("run.yml").values == {}


NOT_WRITTEN = [
    ({"a": math.nan}, "run.yaml: 'a': not a finite number. Write one that is."),
    ({"a": [1, {"b": -math.inf}]}, "run.yaml: 'a.1.b': not a finite number. Write one that is."),
    *[
        ({"a": n}, "run.yaml: 'a': beyond 64 bits. Write a smaller integer.")
        for n in (2**63, -(2**63) - 1, 10**5000)
    ],
    ({"a": "\ud800"}, r"run.yaml: 'a': not text: it holds half of a surrogate pair."),
    ({"\udfff": 1}, r"run.yaml: '': not text: it holds half of a surrogate pair."),
    ({"t": {1: 2}}, "run.yaml: 't': key '1' must be text of at most 1000 characters."),
    ({"k" * 1001: 2}, "must be text of at most 1000 characters."),
    (
        {"a": Path("x")},
        "run.yaml: 'a': must be text, a number, true, false or null; got PosixPath. Write it as "
        "text.",
    ),
    ({"a": {1, 2}}, "got set. Write it as text."),
    ({"a": [[[[[[[[1]]]]]]]]}, "nested more than 8 deep. Flatten it."),
    (
        {"a": "x" * 1_000_000},
        "run.yaml: 1,000,004 bytes of settings; at most 1,000,000 can be read back.",
    ),
]


@pytest.mark.parametrize(("values", "words"), NOT_WRITTEN)
def test_settings_that_cannot_be_read_back_are_not_written(here, values, words):
    (found,) = refusal(lambda: settings.dump(values, "run.yaml"))
    assert found.endswith(words)
    assert os.listdir() == []


def test_longest_key_is_read_back(here):
    values = {"k" * 1000: 1, "a": [{"é " * 499: 2}]}
    settings.dump(values, "run.yaml")
    assert settings.load("run.yaml").values == values
    assert refusal(lambda: settings.dump({}, "run.json")) == [
        "run.json: settings are written as YAML. Name the file .yaml."
    ]


def test_a_file_is_written_whole_or_not_at_all(here, monkeypatch):
    settings.dump({"a": 1}, "run.yaml")
    assert os.listdir() == ["run.yaml"]
    calls, fsync, replace = [], os.fsync, os.replace

    def synced(file):
        is_file = stat.S_ISREG(os.fstat(file).st_mode)
        calls.append(
            ("data", os.fstat(file).st_size) if is_file else ("folder", len(os.listdir(file)))
        )
        fsync(file)

    def renamed(old, new):
        calls.append(("name", Path(old).resolve().parent == Path(new).resolve().parent))
        replace(old, new)

    with monkeypatch.context() as watched:
        watched.setattr(os, "fsync", synced)
        watched.setattr(os, "replace", renamed)
        settings.dump({"a": 2}, "run.yaml")
    assert calls == [("data", len("a: 2\n")), ("name", True), ("folder", 1)]

    def full(*_):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as broken:
            broken.setattr(os, name, full)
            (found,) = refusal(lambda: settings.dump({"a": 3}, "run.yaml"), StorageError)
        assert found.startswith("'run.yaml' cannot be written: No space left on device (")
        assert found.endswith(
            " bytes free). Its previous content is intact; make room or choose another place."
        )
        assert os.listdir() == ["run.yaml"]
        assert settings.load("run.yaml").values == {"a": 2}
    Path("folder.yaml").mkdir()
    for path in ("missing/run.yaml", "folder.yaml", "a\0.yaml"):
        refusal(lambda path=path: settings.dump({"a": 3}, path), StorageError)


def test_a_link_is_replaced_not_followed(here):
    Path("target").write_text("mine")
    Path("run.yaml").symlink_to("target")
    settings.dump({"a": 1}, "run.yaml")
    assert Path("target").read_text() == "mine"
    assert settings.load("run.yaml").values == {"a": 1}


# anything at all

PIECES = {
    "yaml": ["a", "b", ": ", ":", "- ", "-", "\n", "\n  ", "\t", "[", "]", "{", "}", ", ", "'",
        '"', "\\", "\\U", "\\x", "#", "&a ", "*a", "!", "!!str ", "%YAML ", "%TAG ", "---\n",
        "...", "? ", "|", ">", "no", "1", "0", "_", ".", "e9", "<<", "\x85", "é", "\ufeff", "\x07",
        "~", "@", "`"],
    "json": ["{", "}", "[", "]", ",", ":", '"', '"a"', "\\", "\\u", "d800", "1", "-", ".", "e99",
        "0", "NaN", "Infinity", "null", "true", " ", "\n", "\t", "é", "/"],
    "toml": ["a", "b", "=", " = ", ".", "[", "]", "[[", "]]", "{", "}", ",", "\n", "\r", '"',
        '"""', "'", "'''", "\\", "\\u", "#", "1", "0", "_", "-", ":", "nan", "inf", "2020-01-01",
        "true", "é", "\t", " "],
}  # fmt: skip


def survives(kind, content):
    """Settings, or an error that names the file on each of its lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"run.{kind}"
        path.write_bytes(content)
        try:
            read = settings.load(path)
        except CoadjointError as e:
            named = str(e).split("\n")
        else:
            named = [read.where(address) for address in read.lines]
            settings.dump(read.values, path.with_suffix(".yml"))
            assert same(settings.load(path.with_suffix(".yml")).values, read.values)
        assert all(line.startswith(f"{path}:") for line in named)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_any_pieces_are_read_or_refused(kind):
    @examples(max_examples=300, deadline=None)
    @given(st.lists(st.sampled_from(PIECES[kind]), max_size=30).map("".join))
    def check(content):
        survives(kind, content.encode())

    check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_any_bytes_in_a_good_file_are_read_or_refused(kind):
    good = LINES[kind].encode()

    @examples(max_examples=300, deadline=None)
    @given(
        st.integers(0, len(good)),
        st.integers(0, 8),
        st.binary(max_size=6) | st.sampled_from(PIECES[kind]).map(str.encode),
    )
    def check(start, length, content):
        survives(kind, good[:start] + content + good[start + length :])

    check()


@pytest.mark.slow
@examples(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES["json"]), max_size=12).map("".join))
def test_json_is_what_json_accepts(content):
    """No more than the standard reader takes, and with its values."""
    try:
        ours = settings.read_json(content)
    except ConfigError:
        return
    assert same(ours, json.loads(content))
