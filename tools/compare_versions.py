"""Compares the results of two versions of this package bit for bit, by their public interface.

    PYTHONPATH=OLD python tools/compare_versions.py record old.json
    PYTHONPATH=NEW python tools/compare_versions.py record new.json
    python tools/compare_versions.py diff old.json new.json

`record` runs the cases of tools/comparison with the package that Python finds, and writes
fingerprints of outputs, gradients, states, counts of GEMMs and logs. It needs no packages except
torch. `diff` prints the differences; its exit code is 1 if there are any. tools/compare_with.sh
does all of this for a commit.

On a GPU, some results are not deterministic (gradients that are summed in no fixed order). Record
one version a second time and pass that file to `diff` as --again: results that differ between the
two records of this version are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

THREADS = 2  # fixed, because sums on the CPU may depend on the number
COMPARED = ("sha256", "dtype", "shape", "value")
Document = dict[str, Any]
Entry = dict[str, Any]


class Record:
    """A file of findings that is a complete JSON document after each case.

    Args:
        path: path of the file.
        versions: the versions that are recorded, the device and the seed.
        planned: names of all cases that will run.
    """

    def __init__(self, path: Path, versions: dict[str, Any], planned: list[str]) -> None:
        self._file = path.open("w")
        head = {"versions": versions, "planned": planned}
        self._file.write(json.dumps(head, indent=1)[:-2] + ',\n "cases": {')
        self._separator = "\n"
        self._end()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _end(self) -> None:
        place = self._file.tell()
        self._file.write("\n}}\n")
        self._file.flush()
        self._file.seek(place)

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Write the findings of a case.

        Args:
            name: name of the case.
            found: the entries that the case has found.
        """
        self._file.write(f"{self._separator}{json.dumps(name)}: {json.dumps(found)}")
        self._separator = ",\n"
        self._end()


def record(arguments: argparse.Namespace) -> int:
    """Run the cases and write what they find."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    import torch  # noqa: PLC0415 - `diff` needs none of these
    from comparison import all_cases  # noqa: PLC0415

    import transformer_engine  # noqa: PLC0415

    torch.set_num_threads(THREADS)
    kinds = {"any", arguments.device}
    if arguments.compiled or arguments.device == "cpu":
        kinds.add("compiled")
    cases = [case for case in all_cases() if case.kind in kinds]
    cases = [case for case in cases if re.search(arguments.only, case.name)]
    random.Random(0).shuffle(cases)  # a time limit then leaves cases of every kind
    versions = {
        "transformer_engine": transformer_engine.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "seed": arguments.seed,
    }
    print(f"{len(cases)} cases of {Path(transformer_engine.__file__).parent}", flush=True)
    with Record(arguments.out, versions, [case.name for case in cases]) as out:
        run(cases, out, arguments)
    return 0


def run(cases: list[Any], out: Record, arguments: argparse.Namespace) -> None:
    """Run cases until all have run or the time is up.

    Args:
        cases: cases of tools/comparison.
        out: the file that receives the findings.
        arguments: arguments of the command line.
    """
    begin, failed, done = time.monotonic(), 0, 0
    for case in cases:
        if time.monotonic() - begin > arguments.limit_seconds:
            break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = case.record(arguments.device, arguments.seed)
        out.add(case.name, found)
        done += 1
        if "error" in found:
            failed += 1
            print(f"{case.name}: {found['error']['value'].splitlines()[0][:200]}")
        if done % 100 == 0:
            print(f"{done} cases, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{done} of {len(cases)} cases in {time.monotonic() - begin:.0f} s, {failed} with errors")


def shown(entry: Entry | None) -> str:
    """A short text about an entry."""
    if entry is None:
        return "nothing"
    if "value" in entry:
        return entry["value"]
    norm = f" of norm {entry['norm']}" if "norm" in entry else ""
    return f"{entry['dtype']}{entry['shape']}{norm} {entry['sha256'][:8]}"


def same(one: Entry | None, other: Entry | None) -> bool:
    """Whether two entries agree in all keys that are compared."""
    if one is None or other is None:
        return one is other
    return all(one.get(key) == other.get(key) for key in COMPARED)


def differences(
    old: dict[str, Entry], new: dict[str, Entry], again: dict[str, Entry]
) -> tuple[list[str], int]:
    """Compare the entries of a case.

    Args:
        old: entries of the first version.
        new: entries of the second version.
        again: entries of a second record of the first version; entries that differ between its two
            records are left out.

    Returns:
        A line for each entry that differs, and the number of entries that were left out.
    """
    found, left_out = [], 0
    for name in [*old, *(name for name in new if name not in old)]:
        one, other = old.get(name), new.get(name)
        if not same(one, again.get(name)):
            left_out += 1
        elif not same(one, other):
            found.append(f"  {name}: {shown(one)} -> {shown(other)}")
    return found, left_out


def only_in(document: Document, other: Document) -> list[str]:
    """Cases that a document planned to run and the other one did not."""
    return sorted(set(document["planned"]) - set(other["planned"]))


def diff(arguments: argparse.Namespace) -> int:
    """Print the differences between two files; return 1 if there are any."""
    documents = [json.loads(path.read_text()) for path in (arguments.old, arguments.new)]
    old, new = documents
    again = json.loads(arguments.again.read_text())["cases"] if arguments.again else {}
    for key in ("torch", "device", "seed"):
        if old["versions"][key] != new["versions"][key]:
            print(f"{key} differs: {old['versions'][key]} -> {new['versions'][key]}")
    unmatched = [(arguments.old, name) for name in only_in(old, new)]
    unmatched += [(arguments.new, name) for name in only_in(new, old)]
    for path, name in unmatched:
        print(f"{name}: only in {path}")
    both = sorted(old["cases"].keys() & new["cases"].keys())
    tensors = differing = unsteady = 0
    for name in both:
        entries, others = old["cases"][name], new["cases"][name]
        lines, left_out = differences(entries, others, again.get(name, entries))
        unsteady += left_out
        tensors += len(entries.keys() | others.keys())
        differing += len(lines)
        if lines:
            print(name, *lines, sep="\n")
    planned = set(old["planned"]) & set(new["planned"])
    if left := len(planned) - len(both):
        print(f"{left} cases were not compared: a limit ended a recording before them")
    if unsteady:
        print(f"{unsteady} tensors were not compared: they do not repeat")
    differing += len(unmatched)
    print(f"{len(both)} cases, {tensors} tensors, {differing} differ")
    return 1 if differing else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command `record` or `diff`.

    Args:
        arguments: arguments of the command line; None for those of this process.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("record", help="run the cases and write what they give")
    one.add_argument("out", type=Path, metavar="OUT.json")
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    one.add_argument("--only", default="", metavar="REGEX", help="cases in whose names it is found")
    one.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn")
    one.add_argument(
        "--limit-seconds",
        type=float,
        default=float("inf"),
        metavar="N",
        help="start no case after so many seconds",
    )
    one.add_argument("--compiled", action="store_true", help="torch.compile on a GPU, too")
    one.set_defaults(run=record)
    two = verbs.add_parser("diff", help="print what differs; the exit code is 1 where something is")
    two.add_argument("old", type=Path, metavar="A.json")
    two.add_argument("new", type=Path, metavar="B.json")
    two.add_argument(
        "--again",
        type=Path,
        metavar="A2.json",
        help="a second record of A's version: what differs from A there is left out",
    )
    two.set_defaults(run=diff)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
