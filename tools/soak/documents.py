"""Compares the YAML parser of `nvdlfw_inspect` with PyYAML on random documents.

If both accept a document, they must read the same values (except for dates). If only one accepts
it, the other's reason must be a known one, in `EXPLAINED` or `PYYAML_REFUSES`.
"""

from __future__ import annotations

import datetime
import json
import math
import random
import re
from typing import Any

import yaml
from outcome import ROOT, Outcome, until

from nvdlfw_inspect import _engine

_TOKENS = (
    *("a", "b", "key", "<<", "1", "-1.5", "0x1F", "1_0", "1:30", "yes", "~", "null", ".inf", "1e3"),
    *(": ", "- ", "? ", ", ", "[", "]", "{", "}", "\n", "\n", "\n  ", "\n    ", "  ", " # x\n"),
    *("'", '"', "|\n", ">-\n", "&x ", "*x", "!!str ", "---\n", "...\n", "\t", "\\n", "é", "%", "@"),
)
# Reasons of our errors (without positions) for documents that PyYAML accepts, and the explanation.
EXPLAINED = {
    "expected a value without a tag": "tags would make objects",
    "expected each key once": "PyYAML takes the last one: a slip of the pen in a configuration",
    "expected the end of the file": "safe_load looks at one document, too, but reads past `...`",
    "expected spaces, got a tab": "PyYAML takes tabs behind values",
    "expected an integer of at most 64 bits": "schedules are counted in 64 bits",
    "expected a value, got a directive": "a configuration has no directives",
    "expected a closing quote": "yaml-cpp would keep or lose blank lines that PyYAML does not",
    "expected > or >-": "yaml-cpp and PyYAML disagree about trailing blank lines",
    "expected a line feed": "line ends of YAML 1.1 that editors do not show",
    "expected a key, got nothing": "a null key is a slip of the pen",
    "expected a plain value as key": "no configuration has such keys",
    "expected an alias of something complete": "cycles have no content",
    "expected letters, digits, - and _": "yaml-cpp takes what stands behind an anchor for its name",
    "expected quotes around a text": "between brackets PyYAML takes the colon for a null key",
    "expected at most": "limits of size and depth",
    "expected text": "control characters",
    "expected YAML": "yaml-cpp's grammar is that of YAML 1.2 in places",
    "expected a mapping": "a merge of what cannot be merged",
}

PYYAML_REFUSES = {
    "could not find expected ':'": "yaml-cpp reads on where PyYAML has seen the start of a key",
    "constructor for the tag 'tag:yaml.org,2002:merge'": "a lone << is a text to us",
    "constructor for the tag 'tag:yaml.org,2002:value'": "a lone = is a text to us",
    "expected the node content, but found": "nothing between two commas, or in a document, is null",
    "expected '<document start>', but found": "a line of a block's text that begins with %",
    'found unknown escape character "\'"': "yaml-cpp reads \\' in double quotes as an apostrophe",
    "found character '%' that cannot start any token": "a text in a list may begin with %",
    "found duplicate anchor": "an anchor may be set anew, as in YAML 1.2",
    r"found character '\t' that cannot start any token": "a tab between words is a space to us",
    "while scanning a directive": "a line of a block's text that begins with %",
}
_MOST_A_SECOND = 2000  # so that in CI machines of any speed read the same documents


def run(seconds: float, seed: int) -> Outcome:
    """Read documents with both parsers until time is up."""
    found, draw = Outcome("documents"), random.Random(seed)
    corpus = [p.read_text() for p in sorted((ROOT / "tests/fuzz/corpus").glob("*.yaml"))]
    for number in until(seconds, least=100):
        if number >= seconds * _MOST_A_SECOND:
            break
        found.count("documents")
        _compare(_document(draw, corpus), found)
    return found


def _document(draw: random.Random, corpus: list[str]) -> str:
    kind = draw.randrange(3)
    if kind == 0:
        return "".join(draw.choices(_TOKENS, k=draw.randint(1, 16)))
    if kind == 1:
        flow = draw.choice((True, False, None))
        return yaml.safe_dump(_value(draw, 3), default_flow_style=flow, allow_unicode=True)
    text = draw.choice(corpus)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice(_TOKENS) + text[at + draw.choice((0, 0, 1, 5)) :]
    return text


def _value(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(8 if depth else 6)
    if kind == 6:
        return [_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == 7:
        return {draw.choice("abcdé "): _value(draw, depth - 1) for _ in range(draw.randrange(4))}
    text = "".join(draw.choices("ab: -#'\"\n{}[]&*!|>%@`,?\\é01", k=draw.randrange(8)))
    return (None, draw.random() * 10 ** draw.randint(-9, 9), draw.randint(-99, 99), True, text)[
        kind % 5
    ]


def _compare(text: str, found: Outcome) -> None:
    ours, refused = _ours(text)
    theirs, error = _theirs(text)
    if refused and error:
        found.count("refused by both")
    elif refused:
        reason = next((r for r in EXPLAINED if r in refused), None)
        found.count(f"refused by us alone: {reason}" if reason else "unexplained")
        if reason is None:
            found.failures.append(f"refused: {refused!r} {text!r}")
    elif error:
        reason = next((r for r in PYYAML_REFUSES if r in error), None)
        found.count(f"read by us alone: {reason}" if reason else "unexplained")
        if reason is None:
            found.failures.append(f"PyYAML refuses ({error}): {text!r}")
    elif _same(ours, theirs):
        found.count("read alike")
    else:
        found.failures.append(f"read as {ours!r} instead of {theirs!r}: {text!r}")


def _ours(text: str) -> tuple[Any, str]:
    try:
        return _engine.parse_yaml(text.encode(), "c.yaml"), ""
    except ValueError as error:
        return None, re.sub(r"^c\.yaml(:\d+:\d+)?: ", "", str(error))


def _theirs(text: str) -> tuple[Any, str]:
    try:
        return yaml.safe_load(text), ""
    except yaml.MarkedYAMLError as error:
        return None, f"{error.context}, {error.problem}"
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        return None, f"{type(error).__name__}: {error}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(b, datetime.date | datetime.datetime):  # a string to our parser
        return isinstance(a, str)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            _same(x, y) and _same(a[x], b[y]) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or json.dumps(a) == json.dumps(b)
    return bool(a == b)
