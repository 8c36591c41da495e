"""Patterns of layer names on which a search would take exponential time are refused."""

import re
import time

import pytest

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect.patterns import search

REFUSED = [
    "(a+)+$",
    "(a*)*b",
    "(a|aa)+$",
    "(a|a)+$",
    "(.|a)*b",
    "(a?){30}a{30}",
    "(x+x+)+y",
    "(?i)(A+a)+b",
    r"(\w+\s?)*$",
    "((a*)b*)*c",
    "(b|a+b)*c",
]
SEARCHED = {
    ".*": True,
    r"layers\.(\d+\.)*mlp": True,
    r"(\w+\.)+\w+$": True,
    ".*(fc1|self_attention).*": True,
    "^(?!.*fc2).*$": True,
    r"[^.]*\.[^.]*": True,
    "((ab)?c)*$": True,
    "(ab){2}": False,
    "é+": False,
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_exponential_patterns_are_refused_at_once(pattern: str) -> None:
    begin = time.process_time()
    with pytest.raises(re.error, match=r"short time, .* like \(a\+\)\+"):
        search(pattern, "a" * 40 + "!")
    assert time.process_time() - begin < 1.0


@pytest.mark.parametrize("pattern", SEARCHED)
def test_other_patterns_are_searched(pattern: str) -> None:
    begin = time.process_time()
    assert search(pattern, "layers.11.mlp.fc1") is SEARCHED[pattern]
    search(pattern, "a" * 40 + "." + "ab" * 20 + "!")
    assert time.process_time() - begin < 1.0


def test_no_pattern_is_an_error() -> None:
    with pytest.raises(re.error, match="unterminated"):
        search("(a", "a")


def test_a_configuration_is_refused_with_a_place(initialize, tmp_path) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text("s:\n  enabled: true\n  layers:\n    layer_name_regex_pattern: (a+)+$\n")
    with pytest.raises(ValueError, match=r"slow\.yaml:4:\d+: .*short time"):
        initialize(file)
    assert debug_api.DEBUG_MANAGER is None
