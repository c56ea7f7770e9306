"""What the index says about an upstream release: the fields of its pin, and its source."""

from __future__ import annotations

import re
import tarfile
from dataclasses import replace
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from .errors import UPSTREAM, USAGE, StackError
from .fetch import unpack
from .files import temp_dir
from .git import Git
from .index import fetch_artifact, finder
from .paths import Stack
from .pin import Artifact, Pin
from .ui import say, step

# Our pin's name for each requirement that requirements/cuda.txt of the release fixes.
_FIXED = {"torch": "torch", "flashinfer-python": "flashinfer"}


def describe(stack: Stack, version: str, offline: bool) -> Pin:
    """The pin of a release, its [stack] part and tree still empty.

    Raises:
        StackError: UPSTREAM if the index has no such release or cannot be asked, USAGE if the
            stack is on it.

    """
    try:
        wanted = Version(version)
    except InvalidVersion as err:
        raise StackError(
            USAGE, f"{version!r} is no version", hint="scripts/rebase.sh 0.33.0"
        ) from err
    if Version(stack.pin.version) == wanted:
        raise StackError(USAGE, f"patches/ is on {version} as it is")
    upcoming = stack.next()
    if offline:
        if upcoming.pin_file.is_file() and Version(upcoming.pin.version) == wanted:
            return upcoming.pin
        raise StackError(
            UPSTREAM,
            f"nothing here says what {version} is, and --offline forbids asking the index",
            hint=f"scripts/rebase.sh {version}",
        )
    pin = stack.pin
    sdist = _sdist(pin, wanted)
    version = str(parse_sdist_filename(sdist.name)[1])
    archive = fetch_artifact(sdist, stack.cache)
    texts = _read(archive, ("vllm/_version.py", "requirements/cuda.txt"))
    found = re.search(r"commit_id = 'g?([0-9a-f]+)'", texts["vllm/_version.py"])
    wheels = {}
    for device, old in pin.wheels.items():
        if new := _wheel(old, wanted):
            wheels[device] = new
        else:
            say(f"the index has no {old.project} {version} like {old.name}: no {device} wheel")
    return Pin(
        version=version,
        tag=f"v{version}",
        commit=found[1] if found else "",
        sdist=sdist,
        sdist_tree="",
        epoch=int(_newest(archive)),
        wheels=wheels,
        revision=0,
        tree="",
        requires=_requires(pin, texts["requirements/cuda.txt"]),
        architectures=pin.architectures,
    )


def _links(project: str) -> list:
    try:
        return list(finder().find_all_packages(project, allow_yanked=True))
    except Exception as err:  # unearth passes its HTTP library's errors through
        raise StackError(
            UPSTREAM,
            f"the package index cannot be asked about {project}",
            [f"{type(err).__name__}: {err}"],
            "pip config list",
        ) from err


def _same(text: str | None, wanted: Version) -> bool:
    try:
        return text is not None and Version(text) == wanted
    except InvalidVersion:
        return False


def _artifact(project: str, link) -> Artifact:
    digests = (link.hash_option or {}).get("sha256")
    if not digests:
        raise StackError(UPSTREAM, f"the index gives no sha256 for {link.filename}")
    return Artifact(project, link.filename, digests[0])


def _sdist(pin: Pin, wanted: Version) -> Artifact:
    offered = _links(pin.sdist.project)
    for found in offered:
        if _same(found.version, wanted) and found.link.filename.endswith(".tar.gz"):
            return _artifact(pin.sdist.project, found.link)
    known = list(dict.fromkeys(str(p.version) for p in offered if p.version))
    raise StackError(
        UPSTREAM,
        f"the package index offers no source of {pin.sdist.project} {wanted}",
        [f"it offers: {', '.join(known[:8]) or 'nothing; no network looks the same'}"],
        "pip config list",
    )


def _wheel(old: Artifact, wanted: Version) -> Artifact | None:
    tags = parse_wheel_filename(old.name)[3]
    for found in _links(old.project):
        try:
            fits = found.link.is_wheel and parse_wheel_filename(found.link.filename)[3] == tags
        except InvalidWheelFilename:
            continue
        if fits and _same(found.version, wanted):
            return _artifact(old.project, found.link)
    return None


def _requires(pin: Pin, text: str) -> dict[str, str]:
    """The pinned versions: what the release fixes is taken from it, the rest is our choice."""
    requires = dict(pin.requires)
    for line in text.splitlines():
        name, equal, rest = line.partition("#")[0].partition(";")[0].partition("==")
        if equal and (ours := _FIXED.get(name.strip())):
            requires[ours] = rest.strip()
    return requires


def _read(archive: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Members of the source folder as text, those that are missing empty."""
    found = dict.fromkeys(names, "")
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                inside = member.name.partition("/")[2]
                if inside in found and member.isfile():
                    found[inside] = tar.extractfile(member).read().decode()
    except (tarfile.TarError, EOFError) as err:
        raise StackError(UPSTREAM, f"{archive.name} cannot be unpacked", [str(err)]) from err
    return found


def _newest(archive: Path) -> float:
    with tarfile.open(archive) as tar:
        return max(member.mtime for member in tar)


def with_tree(pin: Pin, tree: str) -> Pin:
    """The pin, now that the source's tree is known."""
    return replace(pin, sdist_tree=tree)


def bring(stack: Stack, git: Git, pin: Pin, offline: bool) -> str:
    """The release as a commit of `git`'s object store; the same commit that fetch makes."""
    ref = f"refs/ddtree/release/{pin.version}"
    have = git.rev(ref)
    if have and (not pin.sdist_tree or git.tree_of(have) == pin.sdist_tree):
        return have
    archive = fetch_artifact(pin.sdist, stack.cache, offline)
    with step(f"unpack and commit {archive.name}"), temp_dir(git.cwd) as temp:
        source = unpack(archive, temp)
        env = {
            "GIT_DIR": str(git.git_dir()),
            "GIT_WORK_TREE": str(source),
            "GIT_INDEX_FILE": str(temp / "index"),
        }
        Git(source).raw("add", "-A", "-f", env=env)
        tree = Git(source).out("write-tree", env=env)
    if pin.sdist_tree and tree != pin.sdist_tree:
        raise StackError(
            UPSTREAM,
            f"{archive.name} does not give the pinned tree",
            [f"tree expected {pin.sdist_tree}", f"tree found    {tree}"],
        )
    date = f"{pin.epoch} +0000"
    commit = git.out(
        *("commit-tree", tree, "-m", f"vLLM {pin.version} ({pin.sdist.name})"),
        env={"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date},
    )
    git.raw("update-ref", ref, commit)
    return commit
