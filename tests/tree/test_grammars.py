"""Structured output with trees: each node masked by the grammar after its own path.

Outputs are those of no speculation with the same grammar, in whichever backend.
"""

import json
import re
from contextlib import contextmanager

import pytest

import real_pair
from conftest import counters, counting, engine, prompts
from lossless import verifying
from planting import Planter, planting

pytestmark = pytest.mark.exact
DEPTH, NUM_NODES, NUM_TOKENS = 7, 16, 24
BACKENDS = ("xgrammar", "guidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "maximum": 9999},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
REGEX = "([a-f]{2}[0-9]){4}(x|yz)"
CHOICES = ["abcdefgh", "abcdabcd", "hgfedcba"]
TAG = {
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}


def grammar(num_tokens: int = NUM_TOKENS, sampling=None, **options):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    return SamplingParams(
        max_tokens=num_tokens,
        structured_outputs=StructuredOutputsParams(**options),
        **(sampling or {"temperature": 0.0}),
    )


def seeded(seed: int) -> dict:
    return {"temperature": 1.0, "seed": seed}


def requests() -> list:
    return [
        grammar(json=SCHEMA),
        grammar(json=SCHEMA, sampling=seeded(1)),
        grammar(regex=REGEX, sampling=seeded(2)),
        grammar(choice=CHOICES),
    ]


def use_backend(llm, backend: str) -> None:
    """Engines keep the backend of their first request; tests cannot afford one for each."""
    llm.llm_engine.vllm_config.structured_outputs_config.backend = backend
    manager = manager_of(llm)
    manager.backend = manager._grammar_bitmask = None
    manager.backend_name = None  # of 0.33, which refuses another one by it


def manager_of(llm):
    return llm.llm_engine.engine_core.engine_core.structured_output_manager


def answers(llm, ids, params):
    inputs = [{"prompt_token_ids": p} for p in ids]
    outputs = llm.generate(inputs, [p.clone() for p in params], use_tqdm=False)
    return [o.outputs[0] for o in outputs]


def tokens_of(outputs) -> list[list[int]]:
    return [list(o.token_ids) for o in outputs]


@contextmanager
def accepted_paths():
    """Yields a list with (parents, rows walked) of every verified tree."""
    seen = []

    def note(verifier, input_batch, output):
        tree = verifier.draft_tree
        for slot, n in zip(input_batch.idx_mapping.tolist(), output.num_sampled.tolist()):
            seen.append((tree.parents[slot].tolist(), tree.path[slot, 1:n].tolist()))

    with verifying(note):
        yield seen


def num_sideways(paths) -> int:
    """Accepted nodes that are not the first child of their parent."""
    return sum(row != parents.index(parents[row], 1) for parents, path in paths for row in path)


def assert_valid(llm, outputs) -> None:
    tokenizer = llm.get_tokenizer()
    for output, kind in zip(outputs, ("json", "json", "regex", "choice")):
        # The engine's text starts with what of a random prompt is no UTF-8.
        text = tokenizer.decode(output.token_ids, skip_special_tokens=True)
        if output.finish_reason != "stop":
            # The target is random, and may want a long string or number.
            assert kind == "json"
        elif kind == "json":
            assert json.loads(text).keys() == {"name", "n"}
        elif kind == "regex":
            assert re.fullmatch(REGEX, text)
        else:
            assert text in CHOICES


@pytest.mark.feature("structured output: JSON schema, regex, choice, grammars (xgrammar, guidance)")
@pytest.mark.feature(
    "grammars above draft_tree_max_grammar_ms", falls_back="the host would hold the step up"
)
def test_both_backends_mask_every_path(models):
    """Planted trees: the truth lies sideways among drafts that grammars refuse."""
    target, tuned = models.target("qwen3"), requests()
    ids = {
        b: prompts([9 + 5 * i for i in range(len(tuned))], seed=s) for s, b in enumerate(BACKENDS)
    }
    truth = {}
    with engine(target) as llm:
        for backend in BACKENDS:
            use_backend(llm, backend)
            outputs = answers(llm, ids[backend], tuned)
            assert_valid(llm, outputs)
            truth[backend] = tokens_of(outputs)
    planter = Planter(
        {tuple(p): t for b in BACKENDS for p, t in zip(ids[b], truth[b])},
    )
    limits = {"draft_tree_max_grammar_ms": 1e6}
    with (
        planting(planter),
        engine(
            target, models.drafter(DEPTH), num_tokens=NUM_NODES, speculative_config=limits
        ) as llm,
    ):
        for backend in BACKENDS:
            use_backend(llm, backend)
            with accepted_paths() as paths, counting(llm) as spec:
                outputs = answers(llm, ids[backend], tuned)
            assert tokens_of(outputs) == truth[backend]
            assert spec["accepted_tokens"] > 1.5 * spec["drafts"]
            # Refused drafts do not count as proposed.
            assert spec["draft_tokens"] < 0.8 * NUM_NODES * spec["drafts"]
            assert num_sideways(paths) > 10
        assert manager_of(llm).draft_trees.max_seconds == 1e3

        # Above the limit a request walks its spine alone, whatever lies beside it.
        manager_of(llm).draft_trees.max_seconds = 0
        with accepted_paths() as paths:
            assert tokens_of(answers(llm, ids[backend][1:], tuned[1:])) == truth[backend][1:]
        assert num_sideways(paths) == 0 < sum(len(path) for _, path in paths)


def test_a_bad_grammar_fails_alone(models, monkeypatch):
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    compile_grammar = XgrammarBackend.compile_grammar

    def fail(self, request_type, spec, *args, **kwargs):
        if "zz" in spec:
            raise ValueError("no such grammar")
        return compile_grammar(self, request_type, spec, *args, **kwargs)

    monkeypatch.setattr(XgrammarBackend, "compile_grammar", fail)
    tag = grammar(structural_tag=json.dumps(TAG), sampling=seeded(4))
    ids = prompts((12, 20, 31))
    with engine(models.target("qwen3"), models.drafter(DEPTH), num_tokens=NUM_NODES) as llm:
        good = answers(llm, ids[:2], [grammar(regex=REGEX), tag])
        with pytest.raises(VLLMValidationError, match="(?i)regex"):
            answers(llm, ids[:1], [grammar(regex="(a")])
        *others, bad = answers(llm, ids, [grammar(regex=REGEX), tag, grammar(regex="z{2}|zz")])
        assert bad.finish_reason == "error" and not bad.token_ids
        assert tokens_of(others) == tokens_of(good)


@pytest.mark.feature("tool calls and reasoning, streamed")
def test_real_drafts_in_a_stream():
    """A drafter that predicts, prose and tool calls; what streams is what arrives."""
    import eval_prompts
    from transformers import AutoTokenizer
    from vllm.sampling_params import RequestOutputKind

    target = str(real_pair.target())
    tokenizer = AutoTokenizer.from_pretrained(target)
    person = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    # A tool call in its frame, as a parser of tool calls asks for it.
    call = {"type": "json_schema", "json_schema": person}
    tag = {"type": "tag", "begin": '<call name="place">', "content": call, "end": "</call>"}
    tag = {"type": "structural_tag", "format": tag}
    questions = [
        ("Name a large city in Europe as JSON.", grammar(json=person, sampling=seeded(5))),
        ("Where does the Queen of Denmark live?", grammar(structural_tag=json.dumps(tag))),
        ("Is Paris in France?", grammar(choice=["Yes, it is.", "No, it is not.", "Maybe."])),
    ]
    ids = [eval_prompts.encode(tokenizer, eval_prompts.user(q)) for q, _ in questions]
    tuned = [p for _, p in questions]
    with engine(target) as llm:
        expected = answers(llm, ids, tuned)
    with (
        accepted_paths() as paths,
        engine(target, str(real_pair.DRAFTER), num_tokens=15) as llm,
    ):
        streamed = ["" for _ in ids]
        for i, (prompt, p) in enumerate(zip(ids, tuned)):
            p = p.clone()
            p.output_kind = RequestOutputKind.DELTA
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, p)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                streamed[int(output.request_id)] += output.outputs[0].text
        spec = counters(llm)
    assert streamed == [o.text for o in expected]
    assert spec["accepted_tokens"] > spec["drafts"]
    assert num_sideways(paths) > 3
    assert json.loads(streamed[0]).keys() == {"city", "country"}
    assert re.match('<call name="place">{\\s*"city": ".', streamed[1])
    assert streamed[2] in ("Yes, it is.", "No, it is not.", "Maybe.")
