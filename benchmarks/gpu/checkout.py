"""Import it first where a benchmark must run in a checkout that is not installed, as on a machine without an index."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("vllm_ext") is None:
    root = str(Path(__file__).resolve().parents[2])
    sys.path.append(root)
    import vllm_ext

    vllm_ext.__path__.append(root)  # kernels/ is installed as vllm_ext.kernels
