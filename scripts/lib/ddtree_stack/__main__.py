"""Command line of every verb: python -m ddtree_stack VERB ..."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from .errors import CHECK_FAILED, OK, UPSTREAM, USAGE, StackError
from .paths import Stack
from .ui import result

_NEXT = "the stack on the next release: upstream/next and .work/vllm-next"


class _Parser(argparse.ArgumentParser):
    """argparse with our message form."""

    def error(self, message: str) -> None:
        raise StackError(USAGE, message, hint=f"scripts/{self.prog} --help")


def _parser(verb: str) -> _Parser:
    p = _Parser(prog=f"{verb}.sh", allow_abbrev=False)
    if verb == "fetch":
        p.description = (
            "Get the pinned source distribution and make it the base commit of .work/vllm."
        )
        p.add_argument("--offline", action="store_true", help="use only what the cache has")
    elif verb == "apply":
        p.description = "Bring .work/vllm to the series: the base, then one commit per patch."
        p.add_argument("--to", metavar="PATCH", help="stop after this patch")
        p.add_argument("--next", action="store_true", help=_NEXT)
        p.add_argument("--force", action="store_true", help="back up unsaved work and go on")
        p.add_argument("--plain", action="store_true", help="use patch(1); makes no commits")
    elif verb == "refresh":
        p.description = "Export the commits of .work/vllm to patches/."
        p.add_argument("--next", action="store_true", help=_NEXT)
        p.add_argument("--check", action="store_true", help="write nothing, list what differs")
    elif verb == "check":
        p.description = "Prove that patches/ is complete, well-formed and gives the pinned tree."
        p.add_argument("--quick", action="store_true", help="no tree: series, headers, style")
        p.add_argument(
            "--next", action="store_true", help="only that the stack fits the next release"
        )
        p.add_argument(
            "--tests",
            choices=("all", "own", "none"),
            default="all",
            help="own: each patch's Tests: at its own place; all: and every one at the end",
        )
    elif verb == "rebase":
        p.description = "Bring the stack onto another upstream release, as upstream/next."
        p.add_argument("version", nargs="?", metavar="VERSION", help="the release, such as 0.33.0")
        p.add_argument("--offline", action="store_true", help="use only what the cache has")
        what = p.add_mutually_exclusive_group()
        for name, help in (
            ("continue", "go on after a conflict was resolved"),
            ("abort", "give up; everything is as before"),
            ("status", "where it stands, and the next step"),
        ):
            what.add_argument(
                f"--{name}", dest="action", action="store_const", const=name, help=help
            )
    elif verb in ("build", "install"):
        p.description = (
            "Put the patched Python over the pinned wheel's binaries."
            if verb == "build"
            else "Make .venv with the patched tree."
        )
        p.add_argument("--device", choices=("cuda", "cpu"), help="default: what this machine has")
        if verb == "build":
            p.add_argument("--out", type=Path, help="folder of the wheel (default: dist/DEVICE)")
            p.add_argument(
                "--prove",
                action="store_true",
                help="build twice, compare; install with dependencies, pip check, vllm --version",
            )
            p.add_argument(
                "--from-source", action="store_true", help="compile upstream's native code, too"
            )
            p.add_argument("--arch", metavar="LIST", help='with --from-source, such as "10.0 12.0"')
    elif verb == "test":
        p.description = (
            "Run tests/unit (scripts), tests/tree against .venv (tree), or both (all); "
            "gpu: tests/tree and the patches' tests on a CUDA device; "
            "upstream: upstream's own tests, which must pass as they do on the unpatched pin."
        )
        p.usage = "test.sh [scripts|tree|gpu|upstream|all] [options of the suite] [-- PYTEST...]"
        suites = ("scripts", "tree", "gpu", "upstream", "all")
        p.add_argument("suite", nargs="?", default="all", choices=suites)
        gpu = p.add_argument_group("options of gpu")
        gpu.add_argument("--mode", action="append", help="of tests/tree/modes.py, or patches")
        gpu.add_argument("--jobs", type=int, metavar="N", help="processes at a time (upstream too)")
        gpu.add_argument(
            "--sanitize", action="store_true", help="the kernels' tests under compute-sanitizer"
        )
        own = p.add_argument_group("options of upstream")
        own.add_argument("--gpu", action="store_true", help="the files that need a GPU")
        own.add_argument(
            "--record", action="store_true", help="run the unpatched pin and store what it does"
        )
        p.set_defaults(pytest=[])
    elif verb == "bisect":
        p.description = (
            "The first bad patch, or with --upstream the first bad commit with the stack on it. "
            "CMD runs in a checkout: 0 is good, 125 skips, 1 to 127 is bad."
        )
        p.usage = "bisect.sh [--upstream DIR] --good P --bad P -- CMD..."
        p.add_argument("--good", required=True, metavar="P", help="a patch, or base")
        p.add_argument("--bad", required=True, metavar="P", help="a later patch")
        p.add_argument(
            "--upstream",
            type=Path,
            metavar="DIR",
            help="a clone; --good and --bad are its revisions",
        )
    elif verb == "mirror":
        p.description = "A slim copy of a clone of upstream, for quick rebases and bisects."
        p.add_argument("clone", type=Path, nargs="?", metavar="CLONE", help="a clone of upstream")
        p.add_argument("--out", type=Path, help="the mirror (default: .work/mirror.git)")
        p.add_argument("--minimal", action="store_true", help="only files that a patch touches")
        p.add_argument("--list", action="store_true", help="print the paths it keeps, no more")
    elif verb == "demo":
        p.description = "From nothing to a tree-decoded answer; options after -- go to the demo."
        p.set_defaults(options=[])
    elif verb == "report":
        p.description = "Measure the reference pair: tests/models/REPORT.md and its plot."
    elif verb == "bench":
        from ddtree_bench.options import add_options

        p.description = "Tree against chain on this machine's GPU: a table, and JSON."
        add_options(p)
        p.add_argument(
            "--python", metavar="PY", help="a Python that has the patched vLLM (default: .venv's)"
        )
    else:
        raise StackError(USAGE, f"no such verb: {verb}")
    return p


def run(verb: str, argv: list[str]) -> int:
    """Carry out one verb."""
    rest: list[str] = []
    if verb == "demo" and "-h" not in argv and "--help" not in argv:
        argv, rest = [], [x for x in argv if x != "--"]
    elif "--" in argv:
        at = argv.index("--")
        argv, rest = argv[:at], argv[at + 1 :]
    args = _parser(verb).parse_args(argv)
    if rest and verb not in ("test", "demo", "bisect"):
        raise StackError(USAGE, f"unexpected: {' '.join(rest)}", hint=f"scripts/{verb}.sh --help")
    stack = Stack.here()
    if getattr(args, "next", False):
        stack = stack.next()
        if not stack.pin_file.is_file():
            raise StackError(USAGE, "there is no upstream/next", hint="scripts/rebase.sh VERSION")
    if verb == "test" and args.suite == "gpu" and not (args.gpu or args.record):
        from . import gpu

        return gpu.test(stack, rest, args.mode, args.jobs, args.sanitize)
    if verb == "test" and args.suite == "upstream" and not (args.mode or args.sanitize):
        from . import upstream

        return upstream.test(stack, rest, args.gpu, args.record, args.jobs)
    if verb == "test" and (args.mode or args.jobs or args.sanitize):
        raise StackError(USAGE, "--mode, --jobs and --sanitize are options of gpu")
    if verb == "test" and (args.gpu or args.record):
        raise StackError(USAGE, "--gpu and --record are options of upstream")
    module = importlib.import_module(f".{verb}" if verb != "test" else ".testing", __package__)
    if verb == "fetch":
        result(f"base {module.fetch(stack, args.offline)} tree {stack.pin.sdist_tree}")
    elif verb == "apply":
        tree = module.apply(stack, args.to, args.force, args.plain)
        result(f"applied, tree {tree}")
    elif verb == "refresh":
        lines = module.refresh(stack, args.check)
        for line in lines:
            result(line)
        if not lines:
            result(f"{stack.shown(stack.saved_in)}/ says what the work tree says")
        return CHECK_FAILED if args.check and lines else OK
    elif verb == "check" and args.next:
        if args.quick:
            raise StackError(USAGE, "--quick needs no tree, --next is about one")
        from .drift import drift

        drift(stack, args.tests)
    elif verb == "check":
        module.check(stack, args.quick, args.tests)
    elif verb == "rebase":
        module.rebase(stack, args.version, args.action, args.offline)
    elif verb == "build":
        if args.arch and not args.from_source:
            raise StackError(USAGE, "--arch is an option of --from-source")
        if args.from_source:
            if args.device == "cpu":
                raise StackError(USAGE, "--from-source is for --device cuda")
            archs = args.arch or " ".join(stack.pin.architectures)
            result(str(module.from_source(stack, archs, args.out, args.prove)))
        else:
            result(str(module.build(stack, args.device, args.out, args.prove)))
    elif verb == "install":
        result(str(module.install(stack, args.device)))
    elif verb == "mirror":
        if args.list:
            for path in module.wanted(stack, args.minimal):
                result(path)
        elif args.clone is None:
            raise StackError(USAGE, "no clone of upstream given", hint="scripts/mirror.sh --help")
        else:
            result(str(module.mirror(stack, args.clone, args.out, args.minimal)))
    elif verb == "bisect":
        module.bisect(stack, args.good, args.bad, rest, args.upstream)
    elif verb == "test":
        return module.test(stack, args.suite, rest)
    elif verb == "demo":
        return module.demo(stack, rest)
    elif verb == "bench":
        return module.bench(stack, args)
    elif verb == "report":
        result(str(module.report(stack)))
    return OK


def main() -> int:
    """Exit status of the verb; a StackError prints its message."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        return run(verb, sys.argv[2:])
    except StackError as err:
        print(err.render(f"{verb}.sh"), file=sys.stderr)
        return err.code
    except KeyboardInterrupt:
        print(f"{verb}.sh: stopped", file=sys.stderr)
        return CHECK_FAILED
    except OSError as err:
        # Every other one is a defect and keeps its traceback.
        from .index import disk_full

        if not disk_full(err):
            raise
        told = StackError(UPSTREAM, "the disk is full", [str(err)], "df -h .")
        print(told.render(f"{verb}.sh"), file=sys.stderr)
        return told.code


if __name__ == "__main__":
    sys.exit(main())
