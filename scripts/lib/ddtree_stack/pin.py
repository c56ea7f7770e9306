"""upstream/pin.toml: what the patches apply to, and what they must give."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import CHECK_FAILED, StackError
from .files import write_atomic

_HEAD = """\
# What the patches apply to, and the tree they must give. Written by the scripts, never by hand:
# [stack] by refresh.sh, everything else when the stack moves to another upstream release.
"""


@dataclass(frozen=True)
class Artifact:
    """A file on the package index, known by name and digest."""

    project: str
    name: str
    sha256: str


@dataclass(frozen=True)
class Pin:
    """The parsed pin. `tree` fields are git tree ids of the whole source tree."""

    version: str
    tag: str
    commit: str
    sdist: Artifact
    sdist_tree: str
    epoch: int  # seconds; the base commit's and every built file's time
    wheels: dict[str, Artifact]
    revision: int
    tree: str
    requires: dict[str, str]
    architectures: list[str]

    @classmethod
    def load(cls, path: Path) -> Pin:
        """Read the pin; a damaged one is a failed check, not a traceback."""
        try:
            data = tomllib.loads(path.read_text())
            up, stack = data["upstream"], data["stack"]
            return cls(
                version=up["version"],
                tag=up["tag"],
                commit=up["commit"],
                sdist=Artifact(up["sdist"]["project"], up["sdist"]["name"], up["sdist"]["sha256"]),
                sdist_tree=up["sdist"]["tree"],
                epoch=up["sdist"]["epoch"],
                wheels={k: Artifact(**v) for k, v in data.get("wheel", {}).items()},
                revision=stack["revision"],
                tree=stack["tree"],
                requires=dict(data["requires"]["versions"]),
                architectures=list(data["requires"]["architectures"]),
            )
        except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as err:
            raise StackError(
                CHECK_FAILED,
                f"{path.parent.name}/{path.name} cannot be read",
                [f"{type(err).__name__}: {err}"],
                f"git checkout {path}",
            ) from err

    def render(self) -> str:
        """The file's text; loading it gives an equal pin."""
        lines = [
            _HEAD + "[upstream]",
            f'version = "{self.version}"',
            f'tag = "{self.tag}"',
            f'commit = "{self.commit}"',
            "",
            "[upstream.sdist]",
            f'project = "{self.sdist.project}"',
            f'name = "{self.sdist.name}"',
            f'sha256 = "{self.sdist.sha256}"',
            f'tree = "{self.sdist_tree}"',
            f"epoch = {self.epoch}",
        ]
        for device, wheel in sorted(self.wheels.items()):
            lines += [
                "",
                f"[wheel.{device}]",
                f'project = "{wheel.project}"',
                f'name = "{wheel.name}"',
                f'sha256 = "{wheel.sha256}"',
            ]
        archs = ", ".join(f'"{a}"' for a in self.architectures)
        lines += ["", "[requires]", f"architectures = [{archs}]", "", "[requires.versions]"]
        lines += [f'{name} = "{spec}"' for name, spec in self.requires.items()]
        lines += ["", "[stack]", f"revision = {self.revision}", f'tree = "{self.tree}"']
        return "\n".join(lines) + "\n"

    def with_stack(self, revision: int, tree: str) -> Pin:
        """The same upstream under another state of the stack."""
        return replace(self, revision=revision, tree=tree)

    def save(self, path: Path) -> None:
        write_atomic(path, self.render().encode())

    def built_version(self, device: str) -> str:
        """PEP 440 local version: `vllm==0.32.0` pins and version gates still match."""
        return f"{self.version}+ddtree.{self.revision}" + (".cpu" if device == "cpu" else "")
