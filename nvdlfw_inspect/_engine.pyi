# The debug engine (csrc/inspect): what it means stands in its headers.
from typing import Any

def parse_yaml(text: bytes, origin: str) -> Any: ...
