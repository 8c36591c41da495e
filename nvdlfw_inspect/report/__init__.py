"""Reports about runs: tables in the terminal and in notebooks, and a page of charts."""

from nvdlfw_inspect.report.notebook import show

__all__ = ["show"]
