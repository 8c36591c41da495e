"""The cases that `compare_versions.py` runs. They use only the public interface."""

import functools

from comparison import (
    attention_cases,
    compiled_cases,
    function_cases,
    inspected_cases,
    large_cases,
    layer_cases,
    linear_cases,
    sequence_cases,
)
from comparison.bench import Case

FILES = (
    linear_cases,
    attention_cases,
    layer_cases,
    sequence_cases,
    function_cases,
    inspected_cases,
    compiled_cases,
    large_cases,
)


@functools.cache
def all_cases() -> tuple[Case, ...]:
    """The cases of all files."""
    return tuple(case for file in FILES for case in file.cases())
