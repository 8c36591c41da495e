"""`search`: Python's `re`, but it refuses patterns that may take exponential time.

`re` tries every way in which a pattern may match a text. If the body of a repetition matches a text
in several ways, as in `(a+)+`, every further character doubles their number, and nothing can
interrupt the search.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

try:
    from re import _parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as _parser

_MANY = 16  # a repetition with at least this upper bound is treated like an unbounded one
_CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}
_CHARACTERS = frozenset(map(chr, range(257)))  # chr(256) stands for all other characters
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT")
_Item = tuple[Any, Any]


def search(pattern: str, text: str) -> bool:
    """Return whether a pattern matches anywhere in a text.

    Raises:
        re.error: The pattern is invalid, or may take exponential time.
    """
    _check(pattern)
    return re.search(pattern, text) is not None


@cache
def _check(pattern: str) -> None:
    re.compile(pattern)
    for op, value in _within(_parser.parse(pattern)):
        if str(op) in _REPEATS and value[1] >= _MANY and _is_ambiguous(value[2]):
            raise re.error(
                "expected a pattern that is searched in short time, got a repetition of what may "
                "match one text in several ways, like (a+)+"
            )


def _is_ambiguous(body: Any) -> bool:
    """Whether a repetition of `body` may match one text in several ways.

    A varying part of the body does no harm if the body has a mandatory character that this part
    cannot match: that character then shows where one repetition ends and the next one begins.
    """
    separators = [_characters(item) for item in _mandatory(body)]
    return any(
        not varying or not any(one.isdisjoint(varying) for one in separators)
        for varying in map(_characters, filter(_varies, _within(body)))
    )


def _varies(item: _Item) -> bool:
    """Whether an item may match several prefixes of one text, like `a*` or `a|ab`."""
    op, value = item
    if str(op) in _REPEATS:
        return bool(value[0] != value[1])
    if str(op) != "BRANCH":
        return False
    firsts = [_first(list(branch)) for branch in value[1]]
    union = frozenset().union(*firsts)
    return not all(firsts) or sum(map(len, firsts)) > len(union)


def _first(items: list[_Item]) -> frozenset[str]:
    """Return the characters with which a sequence may begin; an empty set if it may be empty."""
    for item in items:
        op, value = item
        if str(op) in ("AT", "ASSERT", "ASSERT_NOT"):
            continue
        if str(op) in _REPEATS and value[0] == 0:
            return frozenset()
        return _characters(item)
    return frozenset()


def _mandatory(items: Any) -> Iterator[_Item]:
    """Yield the single-character items that every match of a sequence contains."""
    for op, value in items:
        if str(op) in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
            yield op, value
        elif str(op) == "SUBPATTERN":
            yield from _mandatory(value[-1])


def _within(items: Any) -> Iterator[_Item]:
    """Yield all items of a sequence, including nested ones."""
    for op, value in items:
        yield op, value
        for inner in _sequences(str(op), value):
            yield from _within(inner)


def _sequences(op: str, value: Any) -> list[Any]:
    if op in (*_REPEATS, "POSSESSIVE_REPEAT", "SUBPATTERN", "ASSERT", "ASSERT_NOT"):
        return [value[-1]]
    if op == "BRANCH":
        return list(value[1])
    if op == "GROUPREF_EXISTS":
        return [one for one in value[1:] if one is not None]
    return [value] if op == "ATOMIC_GROUP" else []


def _characters(item: _Item) -> frozenset[str]:
    """Return all characters that an item may match, in upper and lower case."""
    op, value = str(item[0]), item[1]
    if op in ("LITERAL", "NOT_LITERAL"):
        character = chr(min(value, 256))
        own = frozenset({character, character.lower(), character.upper()}) & _CHARACTERS
        return own if op == "LITERAL" else _CHARACTERS - {character}
    if op == "IN":
        return _of_class(value)
    if op in ("ANY", "GROUPREF"):
        return _CHARACTERS
    inner = [_characters(one) for sequence in _sequences(op, value) for one in sequence]
    return frozenset().union(*inner)


def _of_class(members: list[_Item]) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for op, value in members:
        if str(op) == "RANGE":
            low, high = (min(end, 256) for end in value)
            letters = {chr(c) for c in range(low, high + 1)}
            found |= {x for c in letters for x in (c, c.lower(), c.upper())}
        elif str(op) == "CATEGORY":
            name = str(value).removeprefix("CATEGORY_")
            plain = _CATEGORIES[name.removeprefix("NOT_")]
            matched = {c for c in _CHARACTERS if re.match(plain, c)}
            found |= _CHARACTERS - matched if name.startswith("NOT_") else matched
        elif str(op) != "NEGATE":
            found |= _characters((op, value))
    negated = str(members[0][0]) == "NEGATE"
    return _CHARACTERS - found if negated else found & _CHARACTERS
