"""Pack what was measured: the results that git keeps, and all details of those whose full file is in `full/`.

    python scripts/results_archive.py dist/results.tar.gz

Writes the archive and its SHA-256 beside it, in the form that `sha256sum --check` reads. The same files give the same
bytes. A damaged result is refused, and a full one that is not the one git keeps: the archive is what a figure is cited
by.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from result_file import Result

from vllm_ext.files import replaced
from vllm_ext.report.kept_result import FULL, kept
from vllm_ext.report.provenance import RESULTS


def packed(root: Path) -> bytes:
    """Return the archive of a checkout's results.

    Raises:
        ValueError: there is none, one is damaged, or a full result is not the kept one.
    """
    folder = root / RESULTS
    full = folder / FULL
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".png"))
    if not files:
        raise ValueError(f"{RESULTS}: holds no result; run this in a checkout")
    for path in (path for path in files if path.suffix == ".json"):
        result = Result(root, path.relative_to(folder).as_posix())
        beside = folder / path.relative_to(full) if full in path.parents else path
        if beside != path and (not beside.exists() or kept(result.data) != beside.read_text()):
            raise ValueError(f"{path.relative_to(root)}: is not the result in {beside.relative_to(root)}; delete it")
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for path in files:
            member = tarfile.TarInfo(path.relative_to(root / RESULTS.parent).as_posix())
            member.size = path.stat().st_size
            with path.open("rb") as content:
                archive.addfile(member, content)
    return raw.getvalue()


def main(argv: Sequence[str], root: Path = Path()) -> int:
    """Write the archive and its checksum."""
    if len(argv) != 1:
        print("usage: python scripts/results_archive.py FILE.tar.gz", file=sys.stderr)
        return 2
    out = Path(argv[0])
    try:
        data = packed(root)
        digest = hashlib.sha256(data).hexdigest()
        for path, content in ((out, data), (out.with_name(f"{out.name}.sha256"), f"{digest}  {out.name}\n".encode())):
            with replaced(path) as file:
                file.write(content)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    with_details = len([*(root / RESULTS / FULL).rglob("*.json")])
    print(f"{out}: {len(data) / 2**20:.1f} MiB, all details of {with_details} results, SHA-256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
