"""Settings of Python's garbage collector in test processes."""

import gc


def collect_seldom() -> None:
    """Makes garbage collection rare: compilers would spend a tenth of their time in it.

    Objects that exist now are never scanned. Tests that call `gc.collect()` would otherwise need
    half a second for the objects of all tests.
    """
    gc.freeze()
    gc.set_threshold(20_000)
