"""Engines for the tests of the tree: real vLLM, tiny random models.

How they run is the mode's (modes.py). On the CPU the V2 runner's Triton kernels run in the
interpreter; that is set before vLLM is imported. Engines run in this process, so that tests
can plant trees.
"""

import os

import torch

import modes

MODE_NAME, MODE = modes.chosen(torch.cuda.is_available())
if not MODE.on_gpu:
    os.environ["TRITON_INTERPRET"] = "1"
elif MODE.dtype == "float32":
    # Not the tensor cores' tf32, which is no better than bfloat16 where two tokens nearly tie.
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
os.environ.update(
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
)

import gc
import pickle
from contextlib import contextmanager
from pathlib import Path

import pytest

import block_tables
import tiny_models

LONGEST = ("test_compile_targets.py", "test_hybrid.py", "test_shapes.py", "test_real_pair.py")
PROMPT_LENGTHS = (1, 5, 31, 32, 33, 64, 97, 130)


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "feature(names, keys, falls_back): a row of README's table")
    config.addinivalue_line("markers", "exact: compares tokens, which needs float32 throughout")


def pytest_report_header():
    return f"mode: {MODE_NAME} ({MODE})"


def pytest_collection_modifyitems(items):
    # The longest files first, or one worker is left alone with one of them at the end.
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if MODE.on_gpu:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
        if item.get_closest_marker("exact") and not MODE.exact:
            reason = f"compares tokens; in mode {MODE_NAME} two that nearly tie change places"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> "TinyModels":
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def truths(models, tmp_path_factory):
    """What the engine emits without speculation, by (architecture, temperature).

    It is found once, by the worker of pytest-xdist that asks first.
    """
    from filelock import FileLock

    from lossless import Answers, answer, num_tokens, sampling

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def truth(architecture: str, temperature: float) -> Answers:
        file = folder / f"truth-{architecture}.pickle"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                ids, found = prompts(), {}
                with engine(models.target(architecture)) as llm:
                    for t in (0.0, 1.0):
                        params = sampling(t, num_tokens(architecture, t), len(ids))
                        answers = answer(llm, ids, params)
                        found[t] = (list(answers), answers.likely)
                file.write_bytes(pickle.dumps(found))
        return Answers(*pickle.loads(file.read_bytes())[temperature])

    return truth


class TinyModels:
    """Makes each tiny checkpoint once."""

    def __init__(self, folder: Path):
        self.folder = folder

    def target(self, architecture: str = "qwen3", **overrides) -> str:
        name = "-".join([architecture, *(f"{k}-{v}" for k, v in overrides.items())])
        folder = self.folder / name
        if not folder.exists():
            tiny_models.make_target(folder, architecture, head_dim=MODE.head_dim, **overrides)
        return str(folder)

    def drafter(self, depth: int) -> str:
        folder = self.folder / f"drafter-{depth}"
        if not folder.exists():
            tiny_models.make_drafter(folder, depth + 1, head_dim=MODE.head_dim)
        return str(folder)


def prompts(lengths=PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    """One random prompt of each length; lengths lie on both sides of block borders."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, tiny_models.VOCAB - 1, (n,), generator=generator).tolist() for n in lengths
    ]


@contextmanager
def engine(
    target: str, drafter: str | None = None, method: str = "ddtree", num_tokens: int = 15, **options
):
    """A running `LLM`, shut down at the end. Without a drafter it does not speculate."""
    from vllm import LLM

    if not MODE.on_gpu:
        block_tables.replace_kernels()
    speculative_config = options.pop("speculative_config", {})
    if drafter is not None:
        speculative_config = {
            "method": method,
            "model": drafter,
            "num_speculative_tokens": num_tokens,
            **MODE.speculative_config,
        } | speculative_config
    defaults = dict(
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        # The smallest the CPU has, for paths to cross block borders.
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
    )
    defaults |= MODE.options
    # vLLM collects garbage some ten times at each start: leave out what is there already.
    gc.collect()
    gc.freeze()
    llm = LLM(target, speculative_config=speculative_config or None, **(defaults | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.unfreeze()
        gc.collect()
        if MODE.on_gpu:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


def skip_without_experts() -> None:
    """Skip where vLLM lacks the library of its kernels for experts; the CPU's are elsewhere."""
    if not MODE.on_gpu:
        return
    import vllm._custom_ops  # noqa: F401  It loads the libraries.

    if not hasattr(torch.ops._moe_C, "topk_softmax"):
        pytest.skip("this vLLM has no library of kernels for experts (_moe_C)")


def inputs(prompts: list[list[int] | dict]) -> list[dict]:
    """Prompts as vLLM takes them, which those that are not plain tokens are already."""
    return [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]


def generate(llm, prompts: list[list[int] | dict], params, **options) -> list[list[int]]:
    """Output tokens of each prompt; `params` is one for all or a list."""
    outputs = llm.generate(inputs(prompts), params, use_tqdm=False, **options)
    return [list(o.outputs[0].token_ids) for o in outputs]


def counters(llm) -> dict[str, float]:
    """The engine's speculative-decoding counters, by their last word(s)."""
    prefix = "vllm:spec_decode_num_"
    return {
        m.name.removeprefix(prefix): m.value
        for m in llm.get_metrics()
        if m.name.startswith(prefix) and hasattr(m, "value")
    }


@contextmanager
def counting(llm):
    """Yields a dictionary that in the end has what `counters` rose by."""
    before, rise = counters(llm), {}
    yield rise
    rise |= {name: value - before[name] for name, value in counters(llm).items()}


def tokens_per_step(llm) -> float:
    """Mean tokens a verify step of a request yields, the bonus token included."""
    c = counters(llm)
    return 1 + c["accepted_tokens"] / c["drafts"]
