"""Which folders make up the package; everything else about it stands in pyproject.toml.

The top-level ``kernels/`` and ``patches/`` ship as ``vllm_ext.kernels`` and ``vllm_ext.patches``:
importable top-level packages of those names would shadow published ones.
"""

from setuptools import find_packages, setup

packages = find_packages(include=["vllm_ext", "vllm_ext.*"])
package_dir = {"vllm_ext": "vllm_ext"}
for folder in ("kernels", "patches"):
    for package in [folder, *(f"{folder}.{name}" for name in find_packages(folder))]:
        packages.append(f"vllm_ext.{package}")
        package_dir[f"vllm_ext.{package}"] = package.replace(".", "/")

setup(
    packages=packages,
    package_dir=package_dir,
    package_data={
        "": ["*.cpp", "*.h"],
        "vllm_ext": ["py.typed", "cli/*.txt", "hooks/verified/*.json", "report/*.html"],
    },
)
