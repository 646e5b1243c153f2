"""`glue` writes what MyST-NB reads back, and refuses what a page could not print."""

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from kvshot.errors import KvshotError
from kvshot.notebook import glue


@pytest.fixture(autouse=True)
def shell():
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


@pytest.mark.parametrize("value, text", [
    (np.float64(0.5), "0.5"), (torch.tensor(0.5), "0.5"), (np.int64(3), "3"), (0.25, "0.25"),
    ("yes", "'yes'"),
])
def test_values_become_plain_python(value, text):
    with capture_output() as captured:
        glue("name", value)
    (output,) = captured.outputs
    assert output.data == {"application/papermill.record/text/plain": text}
    assert output.metadata["scrapbook"] == {"name": "name", "mime_prefix": "application/papermill.record/"}


@pytest.mark.parametrize("value", [float("nan"), np.float32("inf"), None, [1.0], np.zeros(2), torch.zeros(1)])
def test_what_is_not_one_finite_value_is_refused(value):
    with pytest.raises(KvshotError, match="name"):
        glue("name", value)
