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
import vllm
from vllm.model_executor.layers.mamba.ops.draft_tree import delta_rule
from vllm.v1.attention.ops import triton_tree_attention
from vllm.v1.attention.ops.triton_tree_attention import select_tiles
from vllm.v1.attention.ops.triton_tree_tail import select_tail_tiles

# Compute capability: shared memory that a block may have, in bytes.
TARGETS = {90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
# Sizes of trees: the largest needs most registers, and no card has fewer.
NUM_NODES, DEPTH = {90: (63, 256), 100: (63,), 120: (63,)}, 15
VOCAB, SEGMENT, FAN = 151936, 8192, 16
# Warps of a block where they are more than one.
WARPS = {
    "_move_kv": 4,
    "_linearize": 4,
    "_reduce_logits": 4,
    "_top_candidates": 4,
    "_sample_blocks": 8,
    "_penalties": 4,
    "_bad_words": 4,
    "_thinking_budget": 4,
    "_tree_attention": 4,
    "_combine_splits": 4,
    "_tree_tail": 4,
    "_tree_conv": 4,
    "_tree_delta_rule": 4,
    "_convolve_paths": 4,
}
# Heads of k and v and their dimension: Qwen3.6-27B.
GDN_SHAPE = dict(HK=16, HV=48, K=128, V=128)
# Bytes that a kernel may put aside, where it may: attention for its masked tiles, which
# run once; the delta rule at more than a chunk of rows, and on sm_120.
SPILLS = {"_tree_attention": 1024, "_tree_tail": 1024, "_tree_delta_rule": 1536}


def cases(num_nodes: int, capability: int) -> dict[str, tuple[str, dict]]:
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
    sampled = "*fp32 *i32 *bf16 i32 *i64 *i32 *fp32 *i64 *i64 i32 i32"
    every_row = sampled.replace("*i64", "", 1)
    copied = every_row.replace("*bf16", "*fp32")
    fp64 = sampled.replace("*fp32", "*fp64", 1)
    logits = dict(APPLY_TEMPERATURE=True, USE_FP64=False, BLOCK=4096)
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
            # Its sort takes half a minute to compile: for one tree and what is served.
            for t in ("bf16",)
            if num_nodes == 63
        },
        "_set_ancestors_kernel": ("*i64 i32 *i32 *i32 i32", dict(W=words, BLOCK=block)),
        "_walk_draft_trees_kernel": (
            "*i64 *i32 *i32 *i32 *i64 *i64 *i32 *i64 *i32 *i32 i32",
            dict(BLOCK=block),
        ),
        "_scatter_draft_trees_kernel": (
            "*i32 *i32 *i32 *i32 *i32 *i64 *i32 *i32 *i32 *i64 *i32 *i32 i32 i32 i32 i32",
            dict(BLOCK=block),
        ),
        **{
            f"_scatter_rows_kernel {size}": (
                "*i32 *i32 *i32 *i32 *i32 *i32 *i32 *i64 *i32 *i32 *i64 i32 i32 i32 i32",
                dict(NUM_WORDS=words, NUM_GROUPS=3, BLOCK_SIZE=size, BLOCK=block),
            )
            for size in (0, 544)
        },
        "_accept_rows_kernel 0": (
            "*i32 *i32 *i32 *i32 *i32 *i32 *i64 *i32 i32",
            dict(state_columns_ptr=None, BLOCK_SIZE=0, BLOCK=block),
        ),
        "_accept_rows_kernel 544": (
            "*i32 *i32 *i32 *i32 *i32 *i32 *i32 *i64 *i32 i32",
            dict(BLOCK_SIZE=544, BLOCK=block),
        ),
        "_set_mrope_depth_positions_kernel": (
            "*i64 i32 *i32 *i32 *i32",
            dict(NUM_SECTIONS=3, BLOCK=block),
        ),
        "_linearize_kernel": (
            "*i64 *i64 *i32 *i32 *i32 *i32 *i64 i32 i32",
            dict(BLOCK=256, PATH=1 << DEPTH.bit_length(), ROWS=block),
        ),
        "_set_accepted_rows_kernel": (
            "*i64 *i32 *i32 *i32 *i32 *i64 i32",
            dict(BLOCK=block),
        ),
        "_sample_blocks_kernel": (every_row, logits | {"rows_ptr": None}),
        "_sample_blocks_kernel rows": (sampled, logits),
        "_sample_blocks_kernel copied": (
            copied,
            logits | {"rows_ptr": None, "APPLY_TEMPERATURE": False},
        ),
        "_sample_blocks_kernel fp64": (fp64, logits | {"USE_FP64": True}),
        "_reduce_blocks_kernel": ("*i64 *fp32 *i32 i32", dict(rows_ptr=None, BLOCK=64)),
        "_reduce_blocks_kernel rows": ("*i64 *fp32 *i32 *i64 i32", dict(BLOCK=64)),
        "_gather_draft_paths_kernel": ("*i32 *i32 *i32 *i32 *i32 *i32 i32 i32", dict(BLOCK=32)),
        "_penalties_kernel": (
            "*fp32 i32 *i32 *i32 *i32 *fp32 *fp32 *fp32 *i32 i32 *i32 i32 i32",
            dict(BLOCK_SIZE=8192, PATH_STRIDE=rows),
        ),
        "_bad_words_kernel": (
            "*fp32 i32 *i32 *i32 i32 *i32 i32 *i32 *i32 i32 *i32 *i32 *i32 *i32",
            dict(PATH_STRIDE=rows),
        ),
        "_thinking_budget_kernel": (
            "*fp32 i32 *i32 *i32 *i32 i32 *i32 *i32 *i32 *i32 *i32 *i32 *i32 *i32",
            dict(START_LEN=2, NATURAL_END_LEN=2, END_LEN=3, PATH_STRIDE=rows),
        ),
        "_move_kv_kernel": (
            "*i64 *i32 i32 *i32 *i32 *i32 *i64 *i64 i32",
            dict(TABLE_WIDTH=8, CHUNK_SIZE=1024),
        ),
        **attention_cases(rows, words, capability),
        **(gdn_cases(num_nodes, capability) if num_nodes < delta_rule.MAX_ROWS else {}),
    }


def attention_cases(rows: int, words: int, capability: int) -> dict[str, tuple[str, dict]]:
    """`cases` of attention: 4 query heads of 128 a KV head."""
    tiles = select_tiles(4 * rows, 128, 2, capability)
    shape = dict(G=4, HEAD=128, PADDED=128, PAGE=16)
    none = dict.fromkeys(("sinks_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr"))
    plain = none | dict(SOFTCAP=False, SINKS=False, Q_SCALE=False, KV_SCALE=False)
    fp8 = plain | dict(Q_SCALE=True, KV_SCALE=True)
    for scale in ("q_scale_ptr", "k_scale_ptr", "v_scale_ptr"):
        del fp8[scale]
    capped = plain | dict(SOFTCAP=True, SINKS=True)
    del capped["sinks_ptr"]
    variants = {
        "": (plain | dict(WINDOW=0), "*bf16", "*bf16", ""),
        " window": (capped | dict(WINDOW=1024), "*bf16", "*bf16", " *bf16"),
        " fp8": (fp8 | dict(WINDOW=0), "*fp8e4nv", "*fp8e4nv", " *fp32 *fp32 *fp32"),
    }
    found = {
        "_combine_splits_kernel": (
            "*bf16 i32 i32 *fp32 *fp32 *i32 *i32 *i32 i32 i32 i32 i32",
            dict(H=32, HEAD=128, PADDED=128, WINDOW=0) | dict(BLOCK_N=tiles.block_n, BLOCK_H=4),
        )
    }
    for name, (constants, q, kv, extra) in variants.items():
        pages, requests = f"{kv} {kv} i32 i32 i32", "*i32 i32 *i32 *i32 *i32 *i32"
        found["_tree_attention_kernel" + name] = (
            f"*bf16 i32 i32 *fp32 *fp32 {q} i32 i32 {pages} {requests} *i32{extra} "
            "i32 i32 i32 i32 i32 fp32 fp32",
            constants
            | shape
            | dict(W=words, H=32, PRECISION="tf32")
            | dict(BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n),
        )
        if name == " window":
            continue
        tail = select_tail_tiles(1 if rows == 16 else 8, 4 * rows, rows)
        del constants["WINDOW"]
        # It writes the rows' K and V to the cache, unless that is of fp8.
        new = "i32 i32" if name else "*bf16 *bf16 i32 i32 *i64"
        no_new = dict.fromkeys(("new_k_ptr", "new_v_ptr", "slot_mapping_ptr")) if name else {}
        found["_tree_tail_kernel" + name] = (
            f"*bf16 i32 i32 *fp32 i32 {q} i32 i32 {pages} {new} {requests}{extra} "
            "i32 i32 fp32 fp32",
            constants
            | shape
            | no_new
            | dict(W=words, UNIFORM=True, PRECISION="tf32")
            | dict(BLOCK_M=tail.block_m, BLOCK_N=tail.block_n)
            | dict(NUM_TILES=-(-rows // tail.block_n)),
        )
    return found


def gdn_cases(num_nodes: int, capability: int) -> dict[str, tuple[str, dict]]:
    """`cases` of gated delta nets, at trees of up to so many nodes."""
    heads, head = GDN_SHAPE["HV"], GDN_SHAPE["K"]
    dim = (2 * GDN_SHAPE["HK"] + heads) * head
    conv = dict(STATE_DIM_STRIDE=1, STATE_COLUMN_STRIDE=dim, DIM=dim, WIDTH=4)
    found = {
        "_tree_conv_kernel": (
            "*bf16 i32 *bf16 i32 *bf16 i32 *bf16 *i32 *i32 *i32 *bf16 *bf16 *bf16 *bf16 *bf16 "
            "i32 i32 i32",
            conv
            | dict(HEADS=heads)
            | dict(bias_ptr=None, SILU=True, BLOCK_ROWS=4, BLOCK_DIM=256, TRIGGER=True),
        )
    }
    # Each takes half a minute to compile.
    sizes = [(31, 32, "fp32")]
    if capability == 90:
        sizes += [(15, 32, "fp32"), (num_nodes, 32, "fp32"), (31, 64, "bf16")]
    for nodes, block_v, state in sizes:
        chunk = 16 if nodes < 16 else 32
        found[f"_tree_delta_rule_kernel {nodes} {block_v} {state}"] = (
            f"{'*bf16 i32 ' * 6} *fp32 *fp32 *{state} i32 *i32 *i32 *i32 i32 i32 fp32",
            dict(V_HEADS_PER_K_HEAD=3, K=head, V=head, BLOCK_K=head, BLOCK_V=block_v)
            | dict(CHUNK=chunk, LOG_CHUNK=chunk.bit_length() - 1)
            | dict(NUM_CHUNKS=-(-(1 + nodes) // chunk), launch_pdl=chunk == 16),
        )
    common = dict(X_STRIDE=dim, TABLE_WIDTH=10)
    conv = dict(CONV_SLOT_STRIDE=3 * dim, CONV_DIM_STRIDE=1, CONV_COLUMN_STRIDE=dim)
    conv |= dict(bias_like=None, SILU=True, Q_DIM=GDN_SHAPE["HK"] * head, DIM=dim, WIDTH=4)
    replay = dict(A_STRIDE=heads, B_STRIDE=heads, STATE_SLOT_STRIDE=heads * head * head)
    replay |= dict(BLOCK_K=head, BLOCK_V=16) | GDN_SHAPE
    none = dict.fromkeys(("num_computed_ptr", "block_tables_ptr"))
    for name, block_size, given in (("", 0, none), (" align", 528, {})):
        tables = "" if given else "*i32 *i64"
        types = f"*i64 *i32 *i32 i32 *i32 *i32 i32 {tables} i32 *bf16"
        place = common | given | dict(BLOCK_SIZE=block_size)
        found["_convolve_paths_kernel" + name] = (
            f"{types} *bf16 *bf16",
            place | conv | dict(BLOCK_DIM=256),
        )
        for state in ("fp32", "bf16") if capability == 90 else ("fp32",):
            found[f"_replay_states_kernel {state}{name}"] = (
                f"{types} *bf16 *{state} *fp32 *fp32",
                place | replay,
            )
    return found


def kernels() -> dict[str, str]:
    """Source of every @triton.jit function of the installed package."""
    import vllm.v1.worker.gpu.spec_decode.ddtree as package

    root = Path(vllm.__path__[0])
    folders = (Path(package.__path__[0]), Path(delta_rule.__file__).parent)
    files = [file for folder in folders for file in folder.glob("*.py")]
    return functions([*files, *(root / "v1/attention/ops").glob("triton_tree_*.py")])


def hooked() -> dict[str, str]:
    """Source of upstream's kernels that read a row's path in a tree, and of what they call."""
    from vllm.v1.worker.gpu.sample import bad_words, penalties, thinking_budget

    modules = (bad_words, penalties, thinking_budget)
    found = functions([Path(module.__file__) for module in modules])
    return {
        name: source
        for name, source in found.items()
        if "PATH_STRIDE" in source or not name.endswith("_kernel")
    }


def called() -> str:
    """Source of upstream's device functions that kernels call, and their constants."""
    import vllm.v1.worker.gpu.sample.gumbel as gumbel

    constants = [
        ast.unparse(node)
        for file in (gumbel.__file__, triton_tree_attention.__file__, delta_rule.__file__)
        for node in ast.parse(Path(file).read_text()).body
        if isinstance(node, ast.Assign) and "tl.constexpr" in ast.unparse(node)
    ]
    return "\n\n\n".join(constants + list(functions([Path(gumbel.__file__)]).values()))


def functions(files) -> dict[str, str]:
    """Source of every @triton.jit function of these files, by name."""
    found = {}
    for file in files:
        source = file.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(d).startswith("triton.jit") for d in node.decorator_list
            ):
                assert node.name not in found, f"two functions {node.name}"
                first = node.decorator_list[0].lineno
                found[node.name] = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
    return found


def test_every_kernel_is_compiled():
    # The rest are called by kernels and compiled with them.
    launched = {name for name in kernels() | hooked() if name.endswith("_kernel")}
    assert {name.split()[0] for name in cases(63, 90)} == launched


@pytest.mark.parametrize("capability", TARGETS)
def test_kernels_fit_the_card(capability, tmp_path, monkeypatch):
    imports = "import triton\nimport triton.language as tl\n\n\n"
    sources = [called(), *kernels().values(), *hooked().values()]
    (tmp_path / "kernels.py").write_text(imports + "\n\n\n".join(sources) + "\n")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(
        [sys.executable, __file__, str(capability)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(distinct_cases(capability)) >= len(cases(63, capability))
    for line in lines:
        _, shared, spilled = line.rsplit(None, 2)
        assert int(shared) <= TARGETS[capability], line
        assert int(spilled) <= SPILLS.get(line.split("_kernel")[0], 0), line


def distinct_cases(capability: int) -> list[tuple[int, str, str, dict, dict]]:
    """Size of trees, name, types, constants and stages; what no size changes comes once."""
    found, seen = [], set()
    for num_nodes in NUM_NODES[capability]:
        for name, (types, constants) in cases(num_nodes, capability).items():
            stages = {}
            if name.startswith("_tree_attention"):
                tiles = select_tiles(4 * (1 + num_nodes), 128, 2, capability)
                stages = {"num_stages": tiles.num_stages}
            case = (name.split()[0], types, repr(constants), repr(stages))
            if case not in seen:
                seen.add(case)
                found.append((num_nodes, name, types, constants, stages))
    return found


def compile_all(capability: int) -> None:
    """Print name, shared memory and spilled bytes of every case, a line each."""
    import kernels as module
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
    from triton.compiler import ASTSource

    # Assembled once, below, where what it says can be read.
    CUDABackend.make_cubin = lambda *_: b""
    for num_nodes, name, types, constants, stages in distinct_cases(capability):
        function = getattr(module, name.split()[0])
        given = iter(types.split())
        signature = {
            argument: "constexpr" if argument in constants else next(given)
            for argument in function.arg_names
        }
        assert next(given, None) is None, name
        # As launched: PyTorch aligns its buffers, and so are their rows.
        unspecialized = {
            p.num
            for p in function.params
            if p.do_not_specialize or p.do_not_specialize_on_alignment
        }
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, (argument, kind) in enumerate(signature.items())
            if i not in unspecialized and (kind.startswith("*") or "stride" in argument)
        }
        compiled = triton.compile(
            ASTSource(function, signature, constants, attrs),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": WARPS.get(name.split("_kernel")[0], 1)} | stages,
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
