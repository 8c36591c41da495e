"""When Python collects garbage in processes of tests."""

import gc


def collect_seldom() -> None:
    """Leave out the objects of now, and begin later: compilers spend a tenth of their time in it.

    Tests collect garbage, too, which takes half a second with the objects of all tests.
    """
    gc.freeze()
    gc.set_threshold(20_000)
