"""Several processes: ranks of one model, which have to agree, and replicas of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from conftest import MODE, counters, engine, generate, prompts
from lossless import sampling
from serving import client_of, server, spec_metrics

pytestmark = [
    pytest.mark.exact,
    pytest.mark.skipif(MODE.on_gpu and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
RANKS, NUM_NODES, DEPTH, NUM_TOKENS = 2, 16, 7, 48


@pytest.fixture(scope="module")
def requests(truths):
    """Prompts, parameters and what one rank emits: greedy and with a seed, in turn."""
    ids = prompts()
    params, truth = [], []
    for i in range(len(ids)):
        temperature = float(i % 2)
        params.append(sampling(temperature, NUM_TOKENS, len(ids))[i])
        truth.append(truths("qwen3", temperature)[i][:NUM_TOKENS])
    return ids, params, truth


@pytest.fixture(scope="module")
def llm(models, requests):
    # Once the truths are known: an engine that starts takes the metrics of others away.
    with engine(
        models.target(),
        models.drafter(DEPTH),
        num_tokens=NUM_NODES,
        speculative_config={"draft_tree_check_ranks": True},
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
        worker_extension_cls="tree_worker.TreeWorker",
    ) as llm:
        yield llm


@pytest.mark.feature("tensor_parallel_size")
def test_ranks_agree_and_are_lossless(llm, requests):
    ids, params, truth = requests
    # Trees of the drafter, from logits that each rank gathers.
    assert generate(llm, ids[:2], params[:2]) == truth[:2]
    assert counters(llm)["drafts"] > NUM_TOKENS
    # Deep, sideways accepts, as every rank compacts its own shard.
    before = counters(llm)["accepted_tokens"]
    llm.collective_rpc("plant", args=({tuple(p): t for p, t in zip(ids, truth)}, 0))
    for i, (prompt, p) in enumerate(zip(ids, params)):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, p)
    outputs, kept = {}, []
    while llm.llm_engine.has_unfinished_requests():
        outputs |= {o.request_id: o.outputs[0].token_ids for o in llm.llm_engine.step()}
        if len(kept) < RANKS * 3:
            kept += llm.collective_rpc("trees_after_company")
    assert [outputs[str(i)] for i in range(len(ids))] == truth
    # Not even where a batch of nobody ran in between.
    assert kept == [True] * RANKS * 3
    planted = llm.collective_rpc("planted")
    assert planted == planted[:1] * RANKS
    lengths = [length for length in planted[0] if length]
    assert len(lengths) > 40 and sum(lengths) / len(lengths) > 2.5
    assert counters(llm)["accepted_tokens"] - before > 0.8 * sum(lengths)


def test_a_rank_of_another_mind_stops_the_engine(llm, requests):
    """The last test of this engine."""
    ids, params, _ = requests
    llm.collective_rpc("break_rank", args=(1,))
    difference = "ranks 0 and 1 .*request .* has tokens of row 3"
    with pytest.raises(RuntimeError, match=difference):
        generate(llm, ids, params)


@pytest.mark.feature("data_parallel_size")
def test_replicas(models, truths, tmp_path):
    """Data parallelism: each of two engines serves some of the requests."""
    ids = prompts()[:4]
    with server(
        models.target(),
        models.drafter(DEPTH),
        NUM_NODES,
        tmp_path / "server.log",
        served_model_name="m",
        data_parallel_size=RANKS,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 << 20,
    ) as url:

        def complete(prompt):
            extra = {"ignore_eos": True, "return_token_ids": True}
            options = dict(model="m", max_tokens=16, temperature=0.0, extra_body=extra)
            answer = client_of(url).completions.create(prompt=prompt, **options)
            return answer.choices[0].token_ids

        with ThreadPoolExecutor(len(ids)) as pool:
            outputs = list(pool.map(complete, ids))
        metrics = spec_metrics(url)
    assert outputs == [t[:16] for t in truths("qwen3", 0.0)[: len(ids)]]
    drafts = {labels: v for name, labels, v in metrics if name.endswith("num_drafts_total")}
    assert len(drafts) == RANKS and all(drafts.values())
