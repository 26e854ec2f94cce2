"""Finds reproductions: files of benchmarks/repro in a checkout, one `Study` each."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

import vllm_ext
from vllm_ext.config import ConfigError
from vllm_ext.simulation.repro.study import Study

_DECISIVE = ("*.py", "kv/*.py", "policies/**/*.py", "prediction/*.py", "scheduling/*.py", "simulation/*.py",
             "simulation/cost/*.py", "simulation/workloads/*.py")  # fmt: skip
FOLDER = Path("benchmarks", "repro")


def folder(given: Path | None = None) -> Path:
    """Return the folder of reproductions: the one given, that of the working directory, or that of the checkout.

    Raises:
        ConfigError: there is none; an installed wheel does not carry them.
    """
    if given is not None:
        candidates = [given]
    else:
        candidates = [Path.cwd() / FOLDER, Path(vllm_ext.__file__).resolve().parents[1] / FOLDER]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    allowed = f"a folder with reproductions; they are in {FOLDER} of a checkout of the repository"
    raise ConfigError("dir", str(given or FOLDER), allowed)


def studies(where: Path) -> dict[str, Study]:
    """Return the reproductions of a folder by id, sorted.

    Raises:
        ConfigError: a file defines no study, or two define the same id.
    """
    found: dict[str, Study] = {}
    for file in sorted(where.glob("*.py")):
        if file.name.startswith("_"):
            continue
        study = _load(file)
        if study.id in found:
            raise ConfigError("id", study.id, f"unique; {file.name} repeats it")
        found[study.id] = study
    return dict(sorted(found.items()))


def source_digest() -> str:
    """Return a checksum of the code that simulates: what other code simulated must not be taken for this one's."""
    package = Path(vllm_ext.__file__).resolve().parent
    digest = hashlib.sha256()
    for file in sorted(file for part in _DECISIVE for file in package.glob(part)):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _load(file: Path) -> Study:
    name = f"vllm_ext_repro_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError("dir", file.name, "a folder of Python files")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    # Studies share helpers in files whose names begin with an underscore.
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    study = getattr(module, "STUDY", None)
    if not isinstance(study, Study):
        raise ConfigError("STUDY", study, f"a Study, in {file.name}")
    return study
