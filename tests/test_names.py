"""The names of precisions and devices, as they are known without torch."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import torch

from slipstream.core.errors import ConfigError
from slipstream.models import load, names


def test_names_are_refused_as_torch_would_have_it() -> None:
    """`names.py` refuses before torch is there, `load.py` with it: the two must say the same."""
    config = cast(Any, None)
    for name in ("int8", "half", "", "Auto"):
        with pytest.raises(ConfigError) as early:
            names.check_dtype_name(name)
        with pytest.raises(ConfigError, match=re.escape(str(early.value))):
            load.pick_dtype(name, torch.device("cpu"), config)
    for name in ("tpu", "cuda:", "cuda:x", "cpu:0", "", "cuda0"):
        with pytest.raises(ConfigError) as early:
            names.check_device_name(name)
        with pytest.raises(ConfigError, match=re.escape(str(early.value))):
            load.pick_device(name)
    for name in ("auto", *names.DTYPE_NAMES):
        names.check_dtype_name(name)
        assert isinstance(load.pick_dtype(name, torch.device("cpu"), config), torch.dtype)
    for name in ("auto", "cpu", "cuda", "cuda:0", "cuda:12"):
        names.check_device_name(name)
