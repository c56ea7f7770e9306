"""Every kernel of the tree compiles for the cards people have, without one at hand.

Triton compiles for any target; its ptxas says what a kernel needs. Here Triton is not
interpreted, so each target has a process of its own.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Compute capability: shared memory that a block may have, in bytes.
TARGETS = {90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
NUM_NODES, DEPTH = (15, 63, 256), 15
VOCAB, SEGMENT, FAN = 151936, 8192, 16
# Warps of a block where they are more than one.
WARPS = {"_move_kv": 4, "_linearize": 4, "_reduce_logits": 4, "_top_candidates": 4}


def cases(num_nodes: int) -> dict[str, tuple[str, dict]]:
    """By kernel: the types of its arguments in order, and its compile-time constants."""
    rows = 1 + num_nodes
    block = 1 << (rows - 1).bit_length()
    builder = "*fp32 *i64 *i64 i32 *i32 *i32 *i32 *i32 *i64"
    frontier = 1 << (DEPTH + num_nodes - 1).bit_length()
    built = dict(D=DEPTH, K=num_nodes, B=num_nodes, SPINE=min(DEPTH, num_nodes), FRONTIER=frontier)
    words = (rows + 31) // 32
    k = 1 << (num_nodes - 1).bit_length()
    segments = -(-VOCAB // SEGMENT)
    groups = 1 << (segments * SEGMENT // FAN**2 - 1).bit_length()
    top = dict(K=k, GROUPS=max(k, groups), SEGMENTS=1 << (segments - 1).bit_length(), FAN=FAN)
    return {
        "_build_draft_trees_kernel": (builder, built | {"SPINE_FIRST": False}),
        "_build_draft_trees_kernel spine": (builder, built | {"SPINE_FIRST": True}),
        **{
            f"_reduce_logits_kernel {t}": (
                f"*{t} i32 *{t} *{t} *fp32 *fp32 i32",
                dict(SEGMENT=SEGMENT, FAN=FAN),
            )
            for t in ("bf16", "fp32")
        },
        **{
            f"_top_candidates_kernel {t}": (
                f"*fp32 *i64 *{t} i32 *{t} *{t} *fp32 *fp32 i32 i32 i32 i32 i32",
                top,
            )
            # Sorting as many as 4096 keys of 64 bits takes a minute to compile.
            for t in ("bf16", "fp32")[: 2 if num_nodes < 256 else 1]
        },
        "_set_ancestors_kernel": ("*i64 i32 *i32 *i32 i32", dict(W=words, BLOCK=block)),
        "_walk_draft_trees_kernel": (
            "*i64 *i32 *i32 *i64 *i64 *i32 *i64 *i32 *i32 i32",
            dict(BLOCK=block),
        ),
        "_scatter_draft_trees_kernel": (
            "*i32 *i32 *i32 *i64 *i32 *i32 *i64 *i32 *i32 i32 i32 i32",
            dict(BLOCK=block),
        ),
        "_linearize_kernel": (
            "*i64 *i64 *i32 *i32 *i32 *i32 *i64 i32 i32",
            dict(BLOCK=256, PATH=1 << DEPTH.bit_length(), ROWS=block),
        ),
        "_set_accepted_rows_kernel": (
            "*i64 *i32 *i32 *i32 *i32 *i64 i32",
            dict(BLOCK=block),
        ),
        "_move_kv_kernel": (
            "*i64 *i32 i32 *i32 *i32 *i32 *i64 *i64 i32",
            dict(TABLE_WIDTH=8, CHUNK_SIZE=1024),
        ),
    }


def kernels() -> dict[str, str]:
    """Source of every @triton.jit function of the installed package."""
    import vllm.v1.worker.gpu.spec_decode.ddtree as package

    found = {}
    for file in Path(package.__path__[0]).glob("*.py"):
        source = file.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(d) == "triton.jit" for d in node.decorator_list
            ):
                first = node.decorator_list[0].lineno
                found[node.name] = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
    return found


def test_every_kernel_is_compiled():
    # The rest are called by kernels and compiled with them.
    launched = {name for name in kernels() if name.endswith("_kernel")}
    assert {name.split()[0] for name in cases(15)} == launched


@pytest.mark.parametrize("capability", TARGETS)
def test_kernels_fit_the_card(capability, tmp_path, monkeypatch):
    imports = "import triton\nimport triton.language as tl\n\n\n"
    (tmp_path / "kernels.py").write_text(imports + "\n\n\n".join(kernels().values()) + "\n")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(
        [sys.executable, __file__, str(capability)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == sum(len(cases(b)) for b in NUM_NODES)
    for line in lines:
        _, shared, spilled = line.rsplit(None, 2)
        assert int(shared) <= TARGETS[capability], line
        assert int(spilled) == 0, line


def compile_all(capability: int) -> None:
    """Print name, shared memory and spilled bytes of every case, a line each."""
    import kernels as module
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    for num_nodes in NUM_NODES:
        for name, (types, constants) in cases(num_nodes).items():
            function = getattr(module, name.split()[0])
            given = iter(types.split())
            signature = {
                argument: "constexpr" if argument in constants else next(given)
                for argument in function.arg_names
            }
            assert next(given, None) is None, name
            compiled = triton.compile(
                ASTSource(function, signature, constants),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": WARPS.get(name.split("_kernel")[0], 1)},
            )
            ptx = Path("kernel.ptx")
            ptx.write_text(compiled.asm["ptx"])
            arch = re.search(r"\.target (\w+)", compiled.asm["ptx"])[1]
            told = subprocess.run(
                [get_ptxas(capability).path, "-v", f"--gpu-name={arch}", ptx, "-o", "kernel.cubin"],
                capture_output=True,
                text=True,
                check=True,
            ).stderr
            (spilled,) = re.findall(r"(\d+) bytes spill stores", told)
            print(f"{name} B={num_nodes}", compiled.metadata.shared, spilled)


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
