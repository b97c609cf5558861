"""Errors that a user can mend, told in a sentence."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_sentence_errors() -> Iterator[None]:
    """Ends the program with the message of an error a user can mend, instead of with a stack trace.

    Set `ARPO_TRL_TRACEBACK=1` to see where it came from.
    """
    from ..rollout.environments import EnvironmentForkError
    from ..tools.contract import InfrastructureError

    try:
        yield
    except (ValueError, TypeError, ImportError, OSError, InfrastructureError, EnvironmentForkError) as error:
        if os.environ.get("ARPO_TRL_TRACEBACK") == "1":
            raise
        sys.exit(f"error: {error}")
