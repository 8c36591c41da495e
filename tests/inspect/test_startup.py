"""Mistakes that `initialize` reports before it changes anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspect_logs import messages

import nvdlfw_inspect.api as debug_api

Initialize = Callable[..., Any]


@pytest.mark.usefixtures("notebook")
@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({"s": {"enable": True}}, {}),
        ("no.yaml", {}),
        (None, {"init_training_step": -1}),
        (None, {"feature_dirs": "nowhere"}),
        (None, {"tb_writer": 3}),
    ],
)
def test_a_session_of_a_notebook_survives_mistakes(
    initialize: Initialize, tmp_path: Path, config: Any, arguments: dict[str, Any]
) -> None:
    first = initialize()
    with pytest.raises((ValueError, TypeError)):
        initialize(config, **arguments)
    assert debug_api.DEBUG_MANAGER is first
    debug_api.log_message("goes on")
    assert messages(tmp_path)[-1] == "INFO - goes on"
