"""The tool that compares two versions bit for bit: its files, and differences that it finds."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import compare_versions
from comparison import all_cases
from comparison.bench import pairwise


@pytest.fixture(autouse=True)
def _same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def record(path, only, *more):
    assert compare_versions.main(["record", str(path), "--only", only, *more]) == 0
    return json.loads(path.read_text())


def test_a_version_equals_itself(tmp_path, capsys):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    cases = "^(chunks|Linear/two backwards/delayed)/"
    document = record(one, cases)
    assert len(document["cases"]) > 5 and document["versions"]["torch"] == torch.__version__
    record(other, cases)
    assert compare_versions.main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" 0 differ")


def test_seeds_differ(tmp_path, capsys):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    record(one, "^chunks/lists/fp32")
    record(other, "^chunks/lists/fp32", "--seed", "1")
    assert compare_versions.main(["diff", str(one), str(other)]) == 1
    out = capsys.readouterr().out
    assert "seed differs: 0 -> 1" in out and "  out.0.0: float32[20, 8] of norm" in out


def test_a_limit_leaves_a_whole_document(tmp_path, capsys):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    record(one, "^chunks")
    document = record(other, "^chunks", "--limit-seconds", "-1")
    assert document["cases"] == {} and document["planned"]
    assert compare_versions.main(["diff", str(one), str(other)]) == 0
    assert "cases were not compared: a limit" in capsys.readouterr().out


def written(path, **cases):
    versions = {"torch": "2", "device": "cpu", "seed": 0}
    with compare_versions.Record(path, versions, list(cases)) as out:
        for name, found in cases.items():
            out.add(name, found)
            assert name in json.loads(path.read_text())["cases"]
    return str(path)


def entry(sha):
    return {"sha256": sha, "dtype": "float32", "shape": [2], "norm": "1"}


def test_what_differs(tmp_path, capsys):
    old = written(tmp_path / "a", x={"out": entry("1"), "gone": {"value": "3"}}, y={})
    new = written(tmp_path / "b", x={"out": entry("2"), "new": entry("1")}, z={})
    assert compare_versions.main(["diff", old, new]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"y: only in {old}",
        f"z: only in {new}",
        "x",
        "  out: float32[2] of norm 1 1 -> float32[2] of norm 1 2",
        "  gone: 3 -> nothing",
        "  new: nothing -> float32[2] of norm 1 1",
        "1 cases, 3 tensors, 5 differ",
    ]


def test_what_does_not_repeat_is_left_out(tmp_path, capsys):
    old = written(tmp_path / "a", x={"out": entry("1")})
    new = written(tmp_path / "b", x={"out": entry("2")})
    again = written(tmp_path / "c", x={"out": entry("3")})
    assert compare_versions.main(["diff", old, new, "--again", again]) == 0
    assert "1 tensors were not compared" in capsys.readouterr().out


def test_all_pairs_meet():
    factors = {"a": "123", "b": "4567", "c": "89"}
    rows = pairwise(factors, lambda row: row["a"] + row["b"] != "14")
    met = {pair for row in rows for pair in itertools.combinations(row.items(), 2)}
    for one, other in itertools.combinations(factors, 2):
        for pair in itertools.product(factors[one], factors[other]):
            expected = pair != ("1", "4")
            assert (((one, pair[0]), (other, pair[1])) in met) == expected
    assert rows == pairwise(factors, lambda row: row["a"] + row["b"] != "14")


def test_names_are_unique():
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
