"""Runs compared with what the engine emits without speculation.

In an exact mode that is token for token. Elsewhere a tree's rows and a single row round
differently, and where two tokens nearly tie the other one may win; what follows is then
another text. So a first difference is accepted if, without speculation, the two tokens' logits
were closer than rounding moves them, and if such places are rare. What a wrong mask or position
changes is neither close nor rare.
"""

from contextlib import contextmanager
from unittest import mock

from conftest import MODE, counting, engine, generate, inputs, prompts
from planting import Planter, planting
from tiny_models import HYBRIDS


def num_tokens(architecture: str, temperature: float) -> int:
    """Tokens of an answer: long ones where they are compared token for token, of one model."""
    if architecture == "windowed":
        return 80
    return 512 if MODE.exact and (architecture, temperature) == ("qwen3", 0.0) else 160


# How far apart logits may be that change places (theirs are of order 4, where bfloat16 counts in
# 1/32), and first differences per compared token. With fp8 a rounding that falls the other way
# moves a component of a key by 6 %. A wrong mask makes every other token differ.
NEAR_TIE, MAX_DIFFERENCES = (0.25, 0.06) if MODE.kv_cache_dtype == "auto" else (0.5, 0.1)
# A recurrent state is rounded after each token, too.
HYBRID_DIFFERENCES = 2 * MAX_DIFFERENCES


class Answers(list):
    """Output tokens of each prompt, without speculation.

    Attributes:
        likely: for each prompt and position the likeliest tokens and their log-probabilities;
            None for a prompt that samples, and where the engine is exact.
        exact: trees must give the very same tokens, at near-ties too.

    """

    def __init__(
        self,
        tokens: list[list[int]],
        likely: list[list[dict[int, float]] | None],
        exact: bool = MODE.exact,
    ):
        super().__init__(tokens)
        self.likely = likely
        self.exact = exact

    def cut(self, num_tokens: int) -> "Answers":
        """The same with shorter outputs."""
        return Answers([t[:num_tokens] for t in self], self.likely, self.exact)

    def of(self, *prompts: int) -> "Answers":
        """Those of some prompts."""
        return Answers([self[i] for i in prompts], [self.likely[i] for i in prompts], self.exact)


def answer(
    llm, prompts: list[list[int] | dict], params, exact: bool = MODE.exact, **options
) -> Answers:
    """What an engine without speculation emits; `params` is one for all or a list."""
    if exact:
        tokens = generate(llm, prompts, params, **options)
        return Answers(tokens, [None] * len(prompts), exact)
    if not isinstance(params, list):
        params = [params] * len(prompts)
    params = [p.clone() for p in params]
    for p in params:
        p.logprobs = 8
    outputs = [
        o.outputs[0] for o in llm.generate(inputs(prompts), params, use_tqdm=False, **options)
    ]
    likely = [
        None if p.temperature else [{t: at.logprob for t, at in row.items()} for row in o.logprobs]
        for p, o in zip(params, outputs)
    ]
    return Answers([list(o.token_ids) for o in outputs], likely, exact)


def differences(outputs: list[list[int]], answers: Answers) -> tuple[list[float], int]:
    """What first differences had for a difference of logits, and how many tokens were compared.

    It is infinite where the token was not among the likely ones, 0 where logits are not known.
    """
    assert len(outputs) == len(answers)
    margins, compared = [], 0
    for output, wanted, likely in zip(outputs, answers, answers.likely):
        assert len(output) == len(wanted)
        at = next((i for i, (a, b) in enumerate(zip(output, wanted)) if a != b), None)
        compared += len(wanted) if at is None else at + 1
        if at is not None:
            row = None if likely is None else likely[at]
            margins.append(0.0 if row is None else row[wanted[at]] - row.get(output[at], -1e9))
    return margins, compared


def assert_same(
    outputs: list[list[int]], answers: Answers, max_differences: float = MAX_DIFFERENCES
) -> None:
    """With trees the engine emitted what it emits without, near-ties aside unless exact."""
    if answers.exact:
        assert outputs == answers
        return
    margins, compared = differences(outputs, answers)
    told = f"{len(margins)} first differences in {compared} tokens, by logits {sorted(margins)}"
    print(told)
    assert max(margins, default=0.0) <= NEAR_TIE, told
    # One may be bad luck.
    assert len(margins) <= 1 + max_differences * compared, told


# Tokens of an answer that are asked for at a time.
ROUND = 16


def differences_in_rounds(
    llm, planter: Planter, prompts: list[list[int]], answers: Answers, **options
) -> list[float]:
    """What every difference had for a difference of logits, not only a prompt's first.

    Answers are asked for piece by piece, and from behind the token where one parted. So each of
    their tokens is compared, and what is planted is never another text's.

    Args:
        options: of `generate`; a list has an entry for each prompt.

    """
    margins, begins = [], dict.fromkeys(range(len(answers)), 0)
    while begins:
        pieces = {i: answers[i][begin : begin + ROUND] for i, begin in begins.items()}
        asked = [prompts[i] + answers[i][:begin] for i, begin in begins.items()]
        planter.continuations |= zip(map(tuple, asked), pieces.values())
        params = [sampling(0.0, len(piece), 1)[0] for piece in pieces.values()]
        chosen = {
            k: [v[i] for i in pieces] if isinstance(v, list) else v for k, v in options.items()
        }
        outputs = generate(llm, asked, params, **chosen)
        for output, (i, piece) in zip(outputs, pieces.items(), strict=True):
            likely = [answers.likely[i][begins[i] :]]
            found, compared = differences([output], Answers([piece], likely, exact=False))
            margins += found
            begins[i] += compared
            if begins[i] == len(answers[i]):
                del begins[i]
    return margins


def shortfalls(llm, prompts: list[list[int]], outputs: list[list[int]]) -> list[list[float]]:
    """How much less likely each token of the outputs is than the likeliest, by logits.

    Each is judged by what the output has before it, near-ties and all, in a prefill of an engine
    without speculation. Of greedy outputs none should fall short, but for how a prefill rounds.
    """
    from vllm import SamplingParams

    texts = inputs([p + o for p, o in zip(prompts, outputs, strict=True)])
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    found = []
    for prompt, output in zip(prompts, llm.generate(texts, params, use_tqdm=False), strict=True):
        rows = output.prompt_logprobs[len(prompt) :]
        tokens = output.prompt_token_ids[len(prompt) :]
        found.append(
            [max(x.logprob for x in row.values()) - row[t].logprob for t, row in zip(tokens, rows)]
        )
    return found


@contextmanager
def replays():
    """Counts the target's steps that replay a FULL CUDA graph; all others run eagerly.

    Yields:
        a list with an entry, the number of tokens, for each.

    """
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    original, seen = ModelCudaGraphManager.run_fullgraph, []

    def run_fullgraph(self, desc):
        seen.append(desc.num_tokens)
        return original(self, desc)

    ModelCudaGraphManager.run_fullgraph = run_fullgraph
    try:
        yield seen
    finally:
        ModelCudaGraphManager.run_fullgraph = original


@contextmanager
def verifying(note):
    """Calls `note(verifier, input_batch, output)` after every step that verifies trees."""
    from vllm.v1.worker.gpu.spec_decode.ddtree.verifier import DraftTreeVerifier

    original = DraftTreeVerifier.__call__

    def call(self, logits, input_batch, *args, **kwargs):
        output = original(self, logits, input_batch, *args, **kwargs)
        note(self, input_batch, output)
        return output

    with mock.patch.object(DraftTreeVerifier, "__call__", call):
        yield


def sampling(temperature: float, num_tokens: int, num_prompts: int):
    from vllm import SamplingParams

    return [
        SamplingParams(
            temperature=temperature,
            seed=100 + i if temperature else None,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for i in range(num_prompts)
    ]


def assert_accepted(planter: Planter, spec: dict[str, float]) -> None:
    """Deep plants were accepted; equal outputs prove nothing without.

    A plant is missed where the end of the output cuts the step, or at a near-tie, after which
    nothing is planted any more. `spec` are the engine's counters of the run.
    """
    lengths = [length for length in planter.planted if length]
    # With an fp8 cache a request parts from its answer after a dozen tokens.
    assert len(lengths) > (40 if MODE.exact else 8 if MODE.kv_cache_dtype == "fp8" else 20)
    assert sum(lengths) / len(lengths) > 2.5
    assert spec["accepted_tokens"] > (0.8 if MODE.exact else 0.6) * sum(lengths)


def run_planted(models, truth, architecture, temperature, num_nodes, depth, num_tokens, **options):
    ids = prompts()
    planter = Planter({tuple(p): t for p, t in zip(ids, truth)}, seed=num_nodes)
    with (
        planting(planter, **options),
        replays() as replayed,
        engine(models.target(architecture), models.drafter(depth), num_tokens=num_nodes) as llm,
    ):
        # Warm-up plants nothing; what counts starts here.
        planter.planted.clear()
        replayed.clear()
        with counting(llm) as spec:
            outputs = generate(llm, ids, sampling(temperature, num_tokens, len(ids)))
    max_differences = HYBRID_DIFFERENCES if architecture in HYBRIDS else MAX_DIFFERENCES
    assert_same(outputs, truth.cut(num_tokens), max_differences)
    # Trees ran in the graphs of this mode, not beside them.
    assert (len(replayed) > len(planter.planted) / len(ids) / 2) == MODE.graphs
    return planter, spec
