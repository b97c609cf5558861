"""`arpo-trl doctor`: looks at an installation and a recipe before a machine is spent on them."""

from .examination import examine
from .findings import Finding, report


__all__ = ["Finding", "examine", "report"]
