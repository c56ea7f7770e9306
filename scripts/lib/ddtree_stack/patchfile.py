"""One patch file: a mail as git writes it, its headers, and the rules they must follow."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from functools import cached_property

from unidiff import PatchSet
from unidiff.errors import UnidiffParseError

from .files import sha256_bytes

NAME = re.compile(r"(?P<band>\d\d)\d\d-[a-z0-9]+(?:[-.][a-z0-9]+)+\.patch")
BANDS = {"00", "01", "02", "03", "04", "05"}
STATUS = re.compile(
    r"Pending|Submitted \[https?://\S+\]|Backport \[[0-9a-f]{7,40}\]"
    r"|Denied \[.+\]|Inappropriate \[.+\]"
)
TRAILER = re.compile(r"(?P<key>[A-Z][A-Za-z]*(?:-[A-Za-z]+)*): ?(?P<value>.*)")
REQUIRED = ("Upstream-Status", "Drop-When", "Tests", "Signed-off-by")
PATCH_NAME = "Patch-Name"
_DIFF = re.compile(rb"^(?:---$|---\n|diff --git )", re.MULTILINE)


def canonical_name(name: str) -> str:
    """`0310-a-b` and `0310-a-b.patch` are the same patch."""
    name = name.strip()
    return name if name.endswith(".patch") else f"{name}.patch"


def split_mail(raw: bytes) -> tuple[bytes, bytes]:
    """The mail's headers and message, and the diff (from its first line on)."""
    found = _DIFF.search(raw)
    at = found.start() if found else len(raw)
    return raw[:at], raw[at:]


def trailer_block(message: str) -> tuple[str, list[str]]:
    """The text before the trailers, and the trailers' lines (none: an empty list)."""
    text, lines = message.rstrip("\n"), []
    head, found, last = text.rpartition("\n\n")
    if found and all(TRAILER.fullmatch(x) or x[:1] in " \t" for x in last.split("\n")):
        text, lines = head, last.split("\n")
    return text, lines


def inject_name(raw: bytes, name: str) -> bytes:
    """The mail with a Patch-Name trailer, which lets the name survive any reordering."""
    head, diff = split_mail(raw)
    message = head.decode(errors="surrogateescape").rstrip("\n")
    gap = "\n" if trailer_block(message)[1] else "\n\n"
    named = f"{message}{gap}{PATCH_NAME}: {name}\n\n"
    return named.encode(errors="surrogateescape") + diff


def strip_name(raw: bytes) -> bytes:
    """The mail without its Patch-Name trailer."""
    head, diff = split_mail(raw)
    text, lines = trailer_block(head.decode(errors="surrogateescape"))
    lines = [x for x in lines if not x.startswith(f"{PATCH_NAME}:")]
    message = "\n\n".join([text, *(["\n".join(lines)] if lines else [])]).rstrip("\n")
    return f"{message}\n\n".encode(errors="surrogateescape") + diff


def parse_trailers(lines: list[str]) -> list[tuple[str, str]]:
    """Key and value pairs, continuation lines joined."""
    found: list[tuple[str, str]] = []
    for line in lines:
        match = TRAILER.fullmatch(line)
        if match:
            found.append((match["key"], match["value"].strip()))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
    return found


@dataclass(frozen=True)
class Patch:
    """A patch as it lies in patches/."""

    name: str
    raw: bytes

    @cached_property
    def sha256(self) -> str:
        return sha256_bytes(self.raw)

    @cached_property
    def _parts(self) -> tuple[list[str], str]:
        head, _, message = split_mail(self.raw)[0].decode(errors="replace").partition("\n\n")
        return head.split("\n"), message

    @cached_property
    def subject(self) -> str:
        """The subject line, unfolded, without git's [PATCH]."""
        text, inside = "", False
        for line in self._parts[0]:
            if line.startswith("Subject: "):
                text, inside = line[len("Subject: ") :], True
            elif inside and line[:1] == " ":
                text += line
            else:
                inside = False
        return text.removeprefix("[PATCH] ")

    @cached_property
    def body(self) -> str:
        """The message without subject and trailers."""
        text, lines = trailer_block("\n\n" + self._parts[1])
        return text.strip() if lines else self._parts[1].strip()

    @cached_property
    def trailers(self) -> list[tuple[str, str]]:
        return parse_trailers(trailer_block("\n\n" + self._parts[1])[1])

    def values(self, key: str) -> list[str]:
        """Every value of one trailer."""
        return [v for k, v in self.trailers if k == key]

    @cached_property
    def tests(self) -> list[str]:
        """Node ids the patch must pass at its own place in the series."""
        found = []
        for value in self.values("Tests"):
            if not value.startswith("none"):
                found += [x for x in re.split(r"[,\s]+", value) if x]
        return found

    @cached_property
    def depends(self) -> list[str]:
        found = " ".join(self.values("Depends-On"))
        return [canonical_name(x) for x in re.split(r"[,\s]+", found) if x and x.lower() != "none"]

    @cached_property
    def diff(self) -> PatchSet:
        """The parsed diff. Lines end at LF only, so a CR in upstream's context stays."""
        text = split_mail(self.raw)[1].decode(errors="surrogateescape")
        return PatchSet(io.StringIO(text, newline="\n"))

    @cached_property
    def files(self) -> list[str]:
        """Paths the patch adds, edits, renames or removes."""
        found: dict[str, None] = {}
        for f in self.diff:
            for side in (f.source_file, f.target_file):
                if side and side != "/dev/null":
                    found[side.split("/", 1)[-1]] = None
        return list(found)


def problems(patch: Patch, earlier: list[str]) -> list[str]:
    """Everything wrong with one patch; `earlier` are the names before it in the series."""
    bad = []
    match = NAME.fullmatch(patch.name)
    if not match or match["band"] not in BANDS:
        bad.append("name is not NNNN-area-slug.patch with a band from 00 to 05")
    try:
        patch.raw.decode()
    except UnicodeDecodeError:
        bad.append("not UTF-8")
    if not patch.raw.startswith(b"From 0000000000000000000000000000000000000000 "):
        bad.append("not written by refresh.sh (no zero commit in the From line)")
    bad += _header_problems(patch, earlier)
    try:
        bad += _diff_problems(patch)
    except UnidiffParseError as err:
        bad.append(f"diff cannot be parsed: {err}")
    return bad


def _header_problems(patch: Patch, earlier: list[str]) -> list[str]:
    bad = []
    if not patch.subject or len(patch.subject) > 72:
        bad.append(f"subject has {len(patch.subject)} characters (1 to 72)")
    if patch.subject.startswith("["):
        bad.append("subject starts with brackets")
    if not patch.body:
        bad.append("no body: say why, what, and what breaks without it")
    for key in REQUIRED:
        if not any(patch.values(key)):
            bad.append(f"no {key}: trailer")
    for value in patch.values("Upstream-Status"):
        if not STATUS.fullmatch(value):
            bad.append(f"Upstream-Status: {value!r} is none of the five forms")
    for value in patch.values("Tests"):
        if re.match(r"none\b", value) and not re.fullmatch(r"none: \S.*", value):
            bad.append("Tests: none needs its reason ('none: why')")
    for node in patch.tests:
        if not node.startswith("tests/") or ".py" not in node:
            bad.append(f"Tests: {node!r} is no node id below tests/")
    for name in patch.depends:
        if name not in earlier:
            bad.append(f"Depends-On: {name} does not come earlier in the series")
    if patch.values(PATCH_NAME):
        bad.append("Patch-Name: trailer left in (refresh.sh strips it)")
    return bad


def _diff_problems(patch: Patch) -> list[str]:
    bad = []
    if not len(patch.diff):
        bad.append("changes nothing")
    if b"\nGIT binary patch\n" in patch.raw:
        bad.append("holds a binary file")
    for f in patch.diff:
        if f.is_binary_file:
            bad.append(f"{f.path}: binary")
        if f.path.endswith((".orig", ".rej")):
            bad.append(f"{f.path}: left-over of patch(1)")
        for line in (x for hunk in f for x in hunk if x.is_added):
            text = line.value.rstrip("\n").removesuffix("\r")
            at = f"{f.path}:{line.target_line_no}"
            if text != text.rstrip():
                bad.append(f"{at}: trailing whitespace")
            if re.match(r" +\t", text):
                bad.append(f"{at}: space before tab")
            if re.match(r"(<<<<<<<|>>>>>>>)( |$)", text):
                bad.append(f"{at}: conflict marker")
    return bad
