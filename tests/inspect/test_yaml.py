"""Configurations are read as PyYAML's safe_load does, or refused with a line and column."""

import datetime
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nvdlfw_inspect import _engine

SCALARS = Path(__file__).with_name("scalars.txt").read_text().split()

DOCUMENTS = """
a: 1 # comment
---
{a: [1, 2, {b: c}], d: "e", 'f': 'it''s'}
---
a:
- 1
- - 2
  - 3
b:
    c: |
      two
        lines
    d: >-
      folded
      text
---
a: &x {b: 1, c: 2}
d: *x
e: {<<: *x, c: 3, f: 4}
---
a: &x {p: 1, q: 1}
b: &y {q: 2, r: 2}
c: {z: 0, <<: [*x, *y], r: 3}
---
a: {"<<": 1}
---
- "\\t\\x41\\u00e9\\U0001F600\\\\ \\"q\\" \\
  joined"
- plain over
  two lines
- 'single
  over lines

  and a paragraph'
---
? a
: b
? c
---
2: a
true: b
1.5: d
---
a:
b: {}
c: []
d: ""
---
a: [1, 2, ]
b: {c, d: }
---
"quoted": 'yes'
---
%s
""" % ("z: " + "x" * 100)

REFUSED = {
    "a: !!str 1": "1:4: expected a value without a tag",
    "!foo a: 1": "1:1: expected a value without a tag",
    "a: &x !!int 1": "1:7: expected a value without a tag",
    "a: ! 1": "1:4: expected a value without a tag",
    "a: !!set {b}": "1:4: expected a value without a tag",
    "a: 1\nb: 2\na: 3": "3:1: expected each key once, got 'a' again",
    "{1: a, 1.0: b}": "1:8: expected each key once",
    "a: {<<: {b: 1}, <<: {c: 1}}": "1:17: expected each key once",
    "a: 1\n---\nb: 2": "expected the end of the file",
    "a: 1\n...\n---\n": "expected the end of the file",
    "a: \xe9\n\tb: 1": "2:1: expected spaces, got a tab",
    "é: 1\t": "1:5: expected spaces, got a tab",
    "a: {b: 1,\tc: 2}": "1:10: expected spaces, got a tab",
    "a: x\ty": "1:5: expected spaces, got a tab",
    "\ufeff\ufeffa: 1": "1:1: expected text without a byte order mark",
    "a: \ufeff1": "1:4: expected text without a byte order mark",
    "a: 1\x85b: 2": "1:5: expected a line feed at a line's end, got U+0085 (in quotes: \\N)",
    "a: 'x\u2028y'": "1:6: expected a line feed at a line's end, got U+2028 (in quotes: \\L)",
    "# x\u2029a: 1": "1:4: expected a line feed at a line's end, got U+2029 (in quotes: \\P)",
    'a: "\\ud800"': "expected YAML",
    'a: "\\é"': "expected YAML",
    "a: \x07": "1:4: expected text, got control character 7",
    "a: 'x\n  \x00'": "2:3: expected text, got control character 0",
    "a: &x [1, *x]": "1:11: expected an alias of something complete",
    "a: *x": "1:4: expected YAML",
    "? [1]\n: 2": "expected a plain value as key",
    "a: {<<: 1}": "1:9: expected a mapping, or a list of mappings, after <<",
    "a: {<<: [{b: 1}, 2]}": "1:18: expected a mapping, or a list of mappings, after <<",
    "a: 9223372036854775808": "1:4: expected an integer of at most 64 bits",
    "a: 100000000000000000000000:30": "1:4: expected an integer of at most 64 bits",
    "a: [1": "expected YAML",
    "a: b: c": "1:5: expected YAML",
    "a: 'x": "expected YAML",
    "a: @x": "expected YAML",
    '"': "1:1: expected a closing quote",
    "a: '\n\n'": "1:4: expected a closing quote below its text, got blank lines",
    'a: "x\n\n\n"': "1:4: expected a closing quote below its text, got blank lines",
    "a: >+\n  x\n\n": "1:4: expected > or >-, got >+",
    "a: |\n  x\n   ": "3:1: expected a line feed at the end of the file",
    "a: 1\rb: 2": "1:5: expected a line feed at a line's end, got a carriage return alone",
    "{,}": "expected a key, got nothing",
    "~: x": "1:1: expected a key, got nothing",
    "%TAG ! !": "1:1: expected a value, got a directive",
    "a: b\n%c": "2:1: expected a value, got a directive",
    "a:\n  - 1\n b: 2": "expected YAML",
    'a: "\\q"': "expected YAML",
}


def ours(text: str) -> Any:
    return _engine.parse_yaml(text.encode("utf-8", "surrogatepass"), "c.yaml")


def same(a: Any, b: Any) -> bool:
    """Whether values are equal in value, type and order; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    return bool(a == b)


def assert_same_or_refused(text: str) -> None:
    """Both parsers give the same value, or one refuses the text; our error says where."""
    try:
        expected = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError):
        expected = NotImplemented
    try:
        got = ours(text)
    except ValueError as error:
        assert str(error).startswith("c.yaml:"), error
        return
    if expected is not NotImplemented:
        assert same(got, expected), (text, got, expected)


@pytest.mark.parametrize("scalar", SCALARS)
def test_scalar_resolves_as_in_pyyaml(scalar: str) -> None:
    document = f"a: {scalar}"
    try:
        expected = yaml.safe_load(document)
    except yaml.YAMLError:
        pytest.skip("PyYAML refuses it")
    if isinstance(expected["a"], datetime.date):
        expected["a"] = scalar
    assert same(ours(document), expected)
    assert same(ours(f"'a': '{scalar.replace(chr(39), chr(39) * 2)}'"), {"a": scalar})


@pytest.mark.parametrize("document", DOCUMENTS.split("\n---\n"))
def test_document_reads_as_in_pyyaml(document: str) -> None:
    assert same(ours(document), yaml.safe_load(document))


@pytest.mark.parametrize("text", ["a: 1", "", "é: {b: 'c'}", "# c\na: 1"])
def test_a_byte_order_mark_at_the_start_is_skipped(text: str) -> None:
    assert same(ours("\ufeff" + text), yaml.safe_load(text))


ESCAPES = '0abtnvfre N_LP"\\/'


@pytest.mark.parametrize("escape", [*ESCAPES, "x85", "xa0", "xe9", "u2028", "u00c3", "U0001f600"])
def test_escapes_are_those_of_pyyaml(escape: str) -> None:
    for around in ("%s", "é%s", "%sé", "Ã%s%s", "\U0001f600%s"):
        text = '"' + around.replace("%s", "\\" + escape) + '": 1'
        assert same(ours(text), yaml.safe_load(text)), text


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "~", "\n\n"])
def test_nothing_is_none(text: str) -> None:
    assert ours(text) is None


def test_dates_stay_strings() -> None:
    assert ours("2001-12-14") == "2001-12-14"


def test_tabs_are_text_in_quotes_blocks_and_comments() -> None:
    document = "a: 'x\ty' #\tc\nb: \"x\n  \ty\"\nc: |\n  p\tq\n   \tr\n# \t\nd: >\n  s\tt\ne: 1"
    assert same(ours(document), yaml.safe_load(document))


@pytest.mark.parametrize("style", [">", ">-", "|", "|-", "|+"])
@pytest.mark.parametrize("end", ["", "\n", "\n ", "\n  ", "\n\n", "\n\n  "])
def test_ends_of_blocks_are_those_of_pyyaml(style: str, end: str) -> None:
    text = f"a: {style}\n  x{end}"
    assert ours(text) == yaml.safe_load(text)


@pytest.mark.parametrize("text", REFUSED)
def test_refuses_with_a_place(text: str) -> None:
    with pytest.raises(ValueError, match=r"^c\.yaml:\d+:\d+: expected ") as caught:
        ours(text)
    assert REFUSED[text] in str(caught.value)


@pytest.mark.parametrize(
    "bad", [b"a: \xff", b"\xc0\x80", b"a: \xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82"]
)
def test_refuses_invalid_utf8(bad: bytes) -> None:
    with pytest.raises(ValueError, match=r"c\.yaml:1:\d: expected UTF-8"):
        _engine.parse_yaml(bad, "c.yaml")


def test_limits() -> None:
    assert ours("[" * 32 + "]" * 32) is not None
    for document in (
        "[" * 33 + "]" * 33,
        "\n".join(" " * i + "a:" for i in range(33)) + " {}",
        "a: &a " + "[" * 20 + "]" * 20 + "\nb: " + "[" * 12 + "*a" + "]" * 12,
    ):
        with pytest.raises(ValueError, match="expected at most 32 levels"):
            ours(document)
    assert len(ours("[" + "1," * 9999 + "]")) == 9999
    with pytest.raises(ValueError, match="expected at most 10000 values"):
        ours("[" + "1," * 10000 + "]")
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
    )
    with pytest.raises(ValueError, match="expected at most 10000 values, aliases expanded"):
        ours(bomb)
    assert ours("#" + "x" * (2**20 - 1)) is None
    with pytest.raises(ValueError, match="expected at most 1048576 bytes, got 1048577"):
        ours("#" + "x" * 2**20)


def test_a_bomb_of_merges_is_counted() -> None:
    keys = ", ".join(f"k{i}: {i}" for i in range(900))
    many = f"a: &a {{{keys}}}\nb: [{', '.join(['{<<: *a}'] * 20)}]"
    with pytest.raises(ValueError, match="expected at most 10000 values"):
        ours(many)


PRINTABLE = st.text(
    st.characters(
        codec="utf-8",
        exclude_characters="\x85\u2028\u2029\ufeff\ufffe\uffff",
        exclude_categories=["Cc", "Cs"],
    ),
    max_size=12,
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=True), PRINTABLE
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(PRINTABLE | st.integers(0, 99), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(
    VALUES, st.booleans() | st.none(), st.sampled_from([None, "'", '"', "|"]), st.integers(20, 90)
)
def test_what_pyyaml_writes_is_read_back(
    value: Any, flow: bool | None, style: str | None, width: int
) -> None:
    text = yaml.safe_dump(
        {"value": value}, default_flow_style=flow, width=width, allow_unicode=True, sort_keys=False
    )
    if "!!" in text:  # numbers in quoted or literal style need tags
        return
    assert same(ours(text), yaml.safe_load(text)), text


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789+-_.:eExXbB,inf a~", max_size=12))
def test_any_plain_scalar_resolves_as_in_pyyaml(scalar: str) -> None:
    try:
        if isinstance(yaml.safe_load(f"[{scalar}]"), datetime.date):
            return
    except (yaml.YAMLError, ValueError, OverflowError):
        return
    assert_same_or_refused(f"a: {scalar}")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "a",
                "b",
                ": ",
                "- ",
                "\n",
                "  ",
                "[",
                "]",
                "{",
                "}",
                ", ",
                "1",
                "'",
                '"',
                "#",
                "&x ",
                "*x",
                "<<",
                "|",
                "? ",
            ]
        ),
        max_size=14,
    )
)
def test_any_text_reads_as_in_pyyaml_or_is_refused(parts: list[str]) -> None:
    assert_same_or_refused("".join(parts))
