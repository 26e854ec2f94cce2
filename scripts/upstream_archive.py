"""vLLM's own tests, from the source archive of a version: found where pip looks, checked, and unpacked once.

pip can't be asked for the archive: it would build its metadata, which needs a compiler and minutes. So pip says which
pages it reads, and the page says where the file is and what its SHA-256 must be.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any

PROJECT = "vllm"
WANTED = ("tests/", "pyproject.toml")
"""What is unpacked. Not the package itself: the one under test is the one that is installed."""

_JSON = "application/vnd.pypi.simple.v1+json"
_TIMEOUT_S = 120
_CHUNK_BYTES = 2**20


class ArchiveError(RuntimeError):
    """There is no archive to be had, or not the right one; nothing was unpacked."""


@dataclass(frozen=True)
class Source:
    """Where an archive is, by an index."""

    url: str
    sha256: str


def obtain(version: str, folder: Path) -> Path:
    """Return the folder with vLLM's tests of a version, fetching them if they are not there.

    Args:
        version: Of vLLM; a local part such as ``+cpu`` is left out.
        folder: For what is fetched. A second call finds it there, without a network.

    Raises:
        ArchiveError: No index that pip is configured with has it with a SHA-256, or the file has another.
    """
    public = version.partition("+")[0]
    unpacked = folder / f"{PROJECT}-{public}"
    if not unpacked.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            archive = Path(scratch, "archive.tar.gz")
            download(find(public), archive)
            unpack(archive, Path(scratch, "tests"))
            Path(scratch, "tests").rename(unpacked)
    return unpacked


def find(version: str) -> Source:
    """Return where the source archive of a version is.

    Raises:
        ArchiveError: On no page that pip reads.
    """
    pages = pip_pages()
    for page in pages:
        try:
            with _open(page, _JSON) as answer:
                listed = dict(links(answer.read().decode(), page))
        except OSError as error:  # pip goes on to the next index as well
            print(f"{page}: {error}", file=sys.stderr)
            continue
        if (found := listed.get(f"{PROJECT}-{version}.tar.gz")) is not None:
            return found
    raise ArchiveError(
        f"no {PROJECT}-{version}.tar.gz with a SHA-256 on {', '.join(pages) or 'any page'}; these are the pages that "
        f"`pip index versions {PROJECT}` reads: configure an index that has the source archive"
    )


def pip_pages() -> list[str]:
    """Return the pages on which pip looks for vLLM, in its order, as it is configured here.

    Raises:
        ArchiveError: pip failed; the message holds its last words.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", PROJECT, "--no-binary", PROJECT, "-vv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ArchiveError(f"pip does not find {PROJECT}: {(done.stderr or done.stdout)[-1000:]}")
    return re.findall(r"^Fetching project page and analyzing links: (\S+)$", done.stdout, re.MULTILINE)


def links(page: str, url: str) -> Iterator[tuple[str, Source]]:
    """Yield file names and sources of a page of an index, be it JSON or HTML; those without a SHA-256 are left out."""
    if page.lstrip().startswith("{"):
        files: list[Mapping[str, Any]] = json.loads(page)["files"]
        for file in files:
            if digest := file["hashes"].get("sha256"):
                yield file["filename"], Source(urllib.parse.urljoin(url, file["url"]), digest)
        return
    parser = _Anchors()
    parser.feed(page)
    for target in parser.targets:
        address, _, fragment = urllib.parse.urljoin(url, target).partition("#")
        if fragment.startswith("sha256="):
            name = urllib.parse.unquote(urllib.parse.urlsplit(address).path.rpartition("/")[2])
            yield name, Source(address, fragment.removeprefix("sha256="))


class _Anchors(HTMLParser):
    """Where the links of a page lead."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [value for name, value in attrs if tag == "a" and name == "href" and value]


def download(source: Source, target: Path) -> None:
    """Write an archive to a file.

    Raises:
        ArchiveError: It can't be read, or is not the one that the index names; the file is removed.
    """
    digest = hashlib.sha256()
    try:
        with _open(source.url, "*/*") as answer, target.open("wb") as file:
            while part := answer.read(_CHUNK_BYTES):
                digest.update(part)
                file.write(part)
    except OSError as error:
        target.unlink(missing_ok=True)
        raise ArchiveError(f"{source.url}: {error}") from error
    if digest.hexdigest() != source.sha256:
        target.unlink()
        raise ArchiveError(f"{source.url} has the SHA-256 {digest.hexdigest()}, the index says {source.sha256}")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack what is `WANTED`, without the archive's own top-level folder.

    Raises:
        ArchiveError: It holds no tests, or a name that leaves the folder.
    """
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                member.name = member.name.partition("/")[2]
                if member.isfile() and member.name.startswith(WANTED):
                    tar.extract(member, folder, filter="data")
    except tarfile.TarError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ArchiveError(f"{archive.name}: {error}") from error
    if not (folder / WANTED[0]).is_dir():
        raise ArchiveError(f"{archive.name} holds no tests")


def _open(url: str, accept: str) -> IO[bytes]:
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    request = urllib.request.Request(url, headers={"Accept": f"{accept}, text/html;q=0.1"})
    answer: IO[bytes] = urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context)
    return answer
