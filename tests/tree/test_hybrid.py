"""Trees on targets with gated-delta-net layers: Qwen3-Next, and Qwen3.5 and 3.6, whose layers
are the same, dense and with experts.

A request keeps one state a layer, as without speculation. What a tree's rows bring is recorded,
and the accepted path's rows are replayed.
"""

import importlib.util
import json
import os
import sys
from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch

from conftest import MODE, counters, engine, generate, prompts, skip_without_experts
from lossless import (
    HYBRID_DIFFERENCES,
    NEAR_TIE,
    answer,
    assert_accepted,
    assert_same,
    run_planted,
    shortfalls,
)
from planting import Planter, planting
from test_async import async_scheduling  # noqa: F401
from test_poison import POISON, Poisoner, poison
from tiny_models import make_drafter

pytestmark = pytest.mark.skipif(
    MODE.on_gpu and MODE.dtype == "float32",
    reason="on a GPU upstream's kernel for prompts takes no float32",
)
DEPTH, NUM_NODES = 7, 16
THOUSANDS = 4000
same = partial(assert_same, max_differences=HYBRID_DIFFERENCES)
# Where any of them does; a GPU may be without the library for experts.
HYBRID = "qwen3_5" if MODE.on_gpu else "qwen3_next"


# vLLM's module of Qwen3.5 takes names from it, for pictures; it imports torchvision.
IMAGES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


@pytest.fixture(scope="module", autouse=True)
def images(tmp_path_factory):
    """Text needs no torchvision: where it is missing, those names mean nothing."""
    if importlib.util.find_spec("torchvision"):
        yield
        return
    code = f"""
import sys, types

def name(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {{}})

sys.modules[{IMAGES!r}] = types.ModuleType({IMAGES!r})
sys.modules[{IMAGES!r}].__getattr__ = name
"""
    # vLLM looks at a model's class in a process of its own.
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(code)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        exec(code, {})
        yield
        del sys.modules[IMAGES]


@pytest.fixture(autouse=True)
def fresh_groups():
    """A model with experts has groups of processes that one without does not set up."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def assert_no_more_degenerate(outputs: list[list[int]], truth: list[list[int]]) -> None:
    """Where answers without speculation are no loops, those with trees are none either."""

    def looped(tokens: list[int]) -> bool:
        most = Counter(tokens).most_common(1)[0][1] / len(tokens)
        windows = [tokens[i : i + 128] for i in range(max(len(tokens) - 127, 1))]
        return most > 0.5 or min(len(set(w)) / len(w) for w in windows) < 0.15

    usual = sum(map(looped, truth))
    # What parts at a near-tie may run into a loop of its own.
    assert sum(map(looped, outputs)) <= usual + (0 if MODE.exact else len(truth) // 4)
    assert usual < len(truth)


@pytest.mark.feature("gated-delta-net targets: Qwen3-Next, Qwen3.5, Qwen3.6")
@pytest.mark.parametrize(
    "architecture, temperature, num_nodes, depth",
    [
        ("qwen3_next", 0.0, 33, 15),
        ("qwen3_next", 1.0, 7, 7),
        ("qwen3_5", 0.0, 16, 7),
        pytest.param("qwen3_5", 1.0, 33, 15, marks=pytest.mark.gpu),
        ("qwen3_5_moe", 1.0, 16, 15),
    ],
)
def test_long_outputs_equal_no_speculation(
    models, truths, architecture, temperature, num_nodes, depth
):
    """Deep sideways accepts at every step, by every kind of target."""
    if architecture != "qwen3_5":
        skip_without_experts()
    truth = truths(architecture, temperature)
    with mock.patch("lossless.generate", wraps=generate) as generated:
        outputs = []
        generated.side_effect = lambda *args: outputs.append(generate(*args)) or outputs[-1]
        planter, spec = run_planted(models, truth, architecture, temperature, num_nodes, depth, 160)
    assert_accepted(planter, spec)
    assert_no_more_degenerate(outputs[-1], truth)


def params(max_tokens: int):
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def truth_of(target, ids, max_tokens):
    with engine(target) as llm:
        return answer(llm, ids, params(max_tokens))


@pytest.mark.gpu
def test_thousands_of_tokens_do_not_degenerate(models):
    """States are replayed hundreds of times in a row: no error adds up.

    Answers part at a near-tie long before their ends. Of the greedy ones each token is judged by
    the text it follows, the late ones too, and no more of them may be misfits than without trees.
    """
    target = models.target(HYBRID)
    ids, greedy = prompts((5, 33, 64, 80, 20, 50, 31, 7), seed=2), 6
    tuned = [params(THOUSANDS) for _ in ids]
    for i in range(greedy, len(ids)):
        tuned[i].temperature, tuned[i].seed = 1.0, i

    def misfits(llm, outputs: list[list[int]]) -> float:
        late = [row[-THOUSANDS // 2 :] for row in shortfalls(llm, ids[:greedy], outputs[:greedy])]
        return sum(x > NEAR_TIE for row in late for x in row) / sum(map(len, late))

    with engine(target, max_model_len=4096) as llm:
        truth = answer(llm, ids, tuned)
        usual = misfits(llm, truth)
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    with (
        planting(planter, run_drafter=True),
        engine(target, models.drafter(DEPTH), num_tokens=31, max_model_len=4096) as llm,
    ):
        outputs = generate(llm, ids, tuned)
    same(outputs, truth)
    assert_no_more_degenerate(outputs, truth)
    with engine(target, max_model_len=4096) as llm:
        found = misfits(llm, outputs)
    print(f"misfits: {found:.4f} of late tokens, {usual:.4f} without trees")
    assert found <= 2 * usual + 0.01 < 0.3


def state_specs(llm) -> tuple[list, list[int]]:
    """What a state's pages are, and how many blocks of states each request now holds."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    groups = scheduler.kv_cache_config.kv_cache_groups
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    states = [
        (group.kv_cache_spec, manager)
        for group, manager in zip(groups, managers, strict=True)
        if hasattr(group.kv_cache_spec, "mamba_type")
    ]
    held = [len(blocks) for _, manager in states for blocks in manager.req_to_blocks.values()]
    return [spec for spec, _ in states], held


def block_size_of(llm) -> int:
    """Tokens of a block, which a state must fit in: it is larger than what was asked for."""
    return llm.llm_engine.vllm_config.cache_config.block_size


def test_chunks_preemption_and_states_held(models, tmp_path):
    """Prompts come in chunks between trees, and too few blocks for all of them.

    The drafter's one layer makes two groups of the target's three recurrent layers. A request
    holds one state a layer, no longer than without speculation.
    """
    target = models.target(HYBRID)
    drafter = str(make_drafter(tmp_path / "drafter", DEPTH + 1, layers=1, head_dim=MODE.head_dim))
    ids, num_seqs = prompts((89, 1, 200, 33, 300, 150), seed=1), 4
    with engine(target) as llm:
        block_size = block_size_of(llm)
        # Each of them outgrows its prompt's blocks.
        tuned = params(3 * block_size // 2)
        truth = answer(llm, ids, tuned)
        alone = state_specs(llm)[0][0]
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    # The first prompts, their states in two groups, and two blocks to grow.
    num_blocks = sum(len(p) // block_size + 1 for p in ids[:num_seqs]) + 2 * num_seqs + 2
    options = dict(
        num_tokens=NUM_NODES,
        max_num_batched_tokens=96,
        max_num_seqs=num_seqs,
        max_model_len=320 + 2 * block_size,
        num_gpu_blocks_override=1 + num_blocks,  # and the null block
    )
    held = []
    propose = Planter.plant
    with (
        planting(planter, run_drafter=True),
        engine(target, drafter, **options) as llm,
        mock.patch.object(
            Planter,
            "plant",
            lambda *args: propose(*args) or held.append(state_specs(llm)[1]),
        ),
    ):
        same(generate(llm, ids, tuned), truth)
        # One token beside another's tree, in blocks that others have left their states in.
        same(generate(llm, ids[:2], params(20)), truth.of(0, 1).cut(20))
        specs, _ = state_specs(llm)
        preemptions = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
        accepted = counters(llm)["accepted_tokens"]
    assert preemptions[0] > 0
    # At a near-tie a request parts from what is planted.
    assert accepted > (100 if MODE.exact else 30)
    assert len(specs) == 2
    assert {(s.shapes, s.dtypes, s.num_speculative_blocks) for s in specs} == {
        (alone.shapes, alone.dtypes, 0)
    }
    assert {n for at_once in held for n in at_once} == {1}


def test_prefix_cache_cold_equals_warm(models, async_scheduling):  # noqa: F811
    """States at block borders, which replays have stored, are what a prefill would store.

    The synchronous scheduler frees a block that was passed in mid-path before it caches it.
    """
    target = models.target("qwen3_5")
    ids = prompts((64, 97), seed=3)
    truth = truth_of(target, ids, 160)
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)})
    options = dict(
        num_tokens=NUM_NODES,
        enable_prefix_caching=True,
        # Every state at a block border, not only those at the ends of prompts.
        prefix_cache_retention_interval=None,
        speculative_config={"disable_eagle_block_drop": True},
    )
    with (
        planting(planter, run_drafter=True),
        engine(target, models.drafter(DEPTH), **options) as llm,
    ):
        outputs = generate(llm, ids, params(160))
        same(outputs, truth)
        # The follow-up's prompt is prompt and answer, to just behind a border that trees passed.
        border = 192 // block_size_of(llm) * block_size_of(llm)
        cuts = [border + 2 - len(p) for p in ids]
        follow_ups = [p + o[:cut] for p, o, cut in zip(ids, outputs, cuts)]
        rests = [o[cut:] for o, cut in zip(outputs, cuts)]
        planter.continuations |= {tuple(p): t for p, t in zip(follow_ups, rests)}
        warm = []
        for _ in range(2):
            warm.append([generate(llm, [prompt], params(30))[0] for prompt in follow_ups])
            same(generate(llm, ids, params(160)), truth)
        hits = [m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits"]
    # Of each follow-up, twice.
    assert hits[0] >= 4 * border > 0
    cold = truth_of(target, follow_ups, 30)
    for outputs in warm:
        same(outputs, cold)


def test_rows_see_no_sibling(models):
    """Every other node is NaN when it is verified, and so is its record when paths are replayed."""
    from vllm.model_executor.layers.mamba.ops.draft_tree.commit import GDNStateCommitter

    original, poisoned = GDNStateCommitter.commit, []

    def commit(self, num_accepted_rows, path_rows, query_start_loc, *args):
        starts = query_start_loc.tolist()
        keep = [
            starts[i] + row
            for i, accepted in enumerate(num_accepted_rows.tolist())
            for row in path_rows[i, :accepted].tolist()
        ]
        for layer in self.layers:
            for record in (layer.mixed_qkv, layer.a, layer.b):
                kept = record[keep]
                record.fill_(torch.nan)
                record[keep] = kept
        poisoned.append(starts[-1] - len(keep))
        original(self, num_accepted_rows, path_rows, query_start_loc, *args)

    target = models.target(HYBRID, rope_theta=20000.0)
    poison(target)
    ids = [[3 if t == POISON else t for t in p] for p in prompts((5, 31, 64))]
    # The truth must not be poisoned.
    healthy = params(64)
    healthy.allowed_token_ids = [t for t in range(3, 512) if t != POISON]
    with engine(target) as llm:
        truth = answer(llm, ids, healthy)
    poisoner = Poisoner({tuple(p): t for p, t in zip(ids, truth)})
    with (
        mock.patch.object(GDNStateCommitter, "commit", commit),
        planting(poisoner),
        engine(target, models.drafter(DEPTH), num_tokens=33) as llm,
    ):
        same(generate(llm, ids, healthy), truth)
        assert counters(llm)["accepted_tokens"] > (40 if MODE.exact else 20)
    assert sum(poisoned) > 1000


@pytest.mark.parametrize(
    "architecture, settings",
    [
        ("Mamba2ForCausalLM", {"model_type": "mamba2", "num_heads": 4, "head_dim": 32}),
        ("MambaForCausalLM", {"model_type": "mamba"}),
        (
            "Lfm2ForCausalLM",
            {"model_type": "lfm2", "layer_types": ["conv"] * 3 + ["full_attention"]},
        ),
    ],
)
def test_other_recurrent_layers_are_refused_by_name(models, tmp_path, architecture, settings):
    config = {"hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 4, "state_size": 16}
    config |= {"architectures": [architecture], "num_attention_heads": 4, "expand": 2} | settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (
        pytest.raises(ValueError, match=f"the recurrent layers of {architecture}.*'dflash'"),
        engine(str(tmp_path), models.drafter(DEPTH), skip_tokenizer_init=True),
    ):
        pass


@pytest.mark.exact
def test_blocks_shorter_than_a_tree_are_refused(models):
    """The state of a token must have a block of its own in the step that accepts it.

    Elsewhere blocks, which a state must fit in, are larger than trees can be.
    """
    options = dict(num_tokens=64, enable_prefix_caching=True)
    with (
        pytest.raises(ValueError, match="64 nodes.*blocks of 64.*no more than 63"),
        engine(models.target(HYBRID), models.drafter(DEPTH), **options),
    ):
        pass
