"""Files from the package index, named and checked by the pin, kept in the cache.

The index is the one pip uses: its settings are read, and unearth's default stands in for none.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UPSTREAM, StackError
from .files import sha256_file, temp_dir
from .pin import Artifact
from .ui import say, step

if TYPE_CHECKING:
    from unearth import PackageFinder

_FULL = {errno.ENOSPC, errno.EDQUOT}


def disk_full(err: BaseException) -> bool:
    """Did this fail for want of space?"""
    return isinstance(err, OSError) and err.errno in _FULL


def full_disk_error(path: Path, err: OSError) -> StackError:
    """The one message for a full disk."""
    return StackError(
        UPSTREAM,
        "the disk is full; nothing half-written was left",
        [f"while writing below {path}", str(err)],
        f"df -h {path}",
    )


def pip_settings() -> dict[str, str]:
    """pip's index settings from its environment variables and configuration files."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    found: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        found[key.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ")
    return found


def finder() -> PackageFinder:
    """Looks at every index and folder pip would look at."""
    # A cached file needs neither library nor index: a GPU machine may have neither.
    from unearth import PackageFinder
    from unearth.fetchers.sync import PyPIClient

    have = pip_settings()
    urls = have.get("index-url", "").split()
    if not urls and have.get("no-index", "").lower() not in ("1", "true", "yes"):
        urls = [s["url"] for s in PackageFinder().sources]
    links = [x for x in have.get("find-links", "").split() if "://" in x or os.path.exists(x)]
    hosts = have.get("trusted-host", "").split()
    # One read may be slow on a busy line; the default of 10 s is short for files of 300 MB.
    session = PyPIClient(trusted_hosts=hosts, timeout=60.0)
    return PackageFinder(
        session,
        index_urls=[*urls, *have.get("extra-index-url", "").split()],
        find_links=links,
        trusted_hosts=hosts,
        ignore_compatibility=True,
    )


def _check(path: Path, art: Artifact, where: str) -> None:
    got = sha256_file(path)
    if got != art.sha256:
        raise StackError(
            UPSTREAM,
            f"{art.name} is damaged or not what the pin says",
            [
                f"{where}: {path}, {path.stat().st_size} bytes",
                f"sha256 expected {art.sha256}",
                f"sha256 found    {got}",
            ],
            f"rm {path}" if where == "cached file" else "",
        )


def fetch_artifact(art: Artifact, cache: Path, offline: bool = False) -> Path:
    """The file's path in the cache, downloaded if need be, its digest checked every time."""
    target = cache / art.name
    if target.is_file():
        _check(target, art, "cached file")
        return target
    if offline:
        raise StackError(
            UPSTREAM,
            f"{art.name} is not in the cache, and --offline forbids asking the index",
            [f"cache: {cache}"],
            "scripts/fetch.sh",
        )
    try:
        with temp_dir(target) as temp:
            got = _download(art, temp)
            _check(got, art, "downloaded file")
            os.replace(got, target)
    except OSError as err:
        if disk_full(err):
            raise full_disk_error(cache, err) from err
        raise StackError(
            UPSTREAM, f"the cache cannot be written: {err}", [f"cache: {cache}"]
        ) from err
    return target


def _download(art: Artifact, into: Path) -> Path:
    try:
        find = finder()
        links = [p.link for p in find.find_all_packages(art.project, allow_yanked=True)]
        link = next((x for x in links if x.filename == art.name), None)
    except Exception as err:  # unearth passes its HTTP library's errors through
        raise _unreachable(art, err) from err
    if link is None:
        raise StackError(
            UPSTREAM,
            f"the package index does not offer {art.name}",
            [f"files it offers for {art.project}: {len(links)}", "no network looks the same"],
            "pip config list",
        )
    if link.is_file:
        copy = into / art.name
        with link.file_path.open("rb") as src, copy.open("wb") as dst:
            while piece := src.read(1 << 20):
                dst.write(piece)
        return copy
    with step(f"download {art.name}"):
        try:
            with find.session.get_stream(link.normalized) as resp:
                resp.raise_for_status()
                total = int(resp.headers.get("Content-Length") or 0)
                if total:
                    say(f"  {total / 1e6:.0f} MB")
                with (into / art.name).open("wb") as f:
                    for piece in resp.iter_bytes(1 << 20):
                        f.write(piece)
        except OSError as err:
            if disk_full(err):
                raise
            raise _unreachable(art, err) from err
        except Exception as err:
            raise _unreachable(art, err) from err
    return into / art.name


def _unreachable(art: Artifact, err: Exception) -> StackError:
    return StackError(
        UPSTREAM,
        f"the package index cannot be reached for {art.name}",
        [f"{type(err).__name__}: {err}"],
        "pip config list",
    )
