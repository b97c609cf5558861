"""What a test file of TRL imports from the `testing_utils` beside it, for a file that came alone."""

import importlib.util
from collections.abc import Callable

import pytest
import torch


class TrlTestCase:
    """A test case with a folder of its own."""

    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path):
        self.tmp_dir = str(tmp_path)


def __getattr__(name: str) -> Callable:
    """`require_<package>`: a mark that skips a test where the package, or an accelerator, is not there."""
    if not name.startswith("require_"):
        raise AttributeError(name)
    what = name.removeprefix("require_")
    if what in ("vision", "jmespath"):
        here = True
    elif "accelerator" in what or "gpu" in what or "ampere" in what:
        here = torch.cuda.is_available()
    else:
        here = importlib.util.find_spec(what) is not None
    return pytest.mark.skipif(not here, reason=f"{what} is not here")
