"""Tasks of a stage that wait for `backward_dw`, oldest first."""

from __future__ import annotations

from typing import Any


class DelayedTasks(list[Any]):
    """`ParamGradTask`s of a stage. They hold tensors of a graph, so a copied stage has none."""

    def __deepcopy__(self, memo: object) -> DelayedTasks:
        return DelayedTasks()

    def __reduce__(self) -> tuple[type[DelayedTasks], tuple[()]]:
        return DelayedTasks, ()
