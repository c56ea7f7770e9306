"""`vllm serve` with trees, as clients see it: the real server and the real openai client."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import real_pair
from serving import client_of, server, spec_metrics

pytestmark = pytest.mark.exact
MODEL, MAX_MODEL_LEN = "pair", 512
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "visit", "parameters": SCHEMA}}


def ask(question: str) -> list[dict]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Of a server that verifies trees, up until the last test."""
    with server(
        str(real_pair.target()),
        str(real_pair.DRAFTER),
        31,
        tmp_path_factory.mktemp("serve") / "server.log",
        served_model_name=MODEL,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        kv_cache_memory_bytes=256 << 20,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
    ) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return client_of(url)


def chat(client, question: str, **options):
    options = {"temperature": 0.0, "max_tokens": 24} | options
    return client.chat.completions.create(model=MODEL, messages=ask(question), **options)


@pytest.mark.feature("streaming")
def test_a_stream_is_the_answer_in_order(client):
    whole = chat(client, "Count from one to ten.", logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    told = choice.logprobs.content
    assert "".join(t.token for t in told) == choice.message.content
    assert len(told) == whole.usage.completion_tokens
    # Greedy: what was taken is the most probable.
    assert all(t.token == t.top_logprobs[0].token for t in told)
    stream = chat(
        client,
        "Count from one to ten.",
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, tokens, usage = "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices:
            text += part.delta.content or ""
            if part.logprobs:
                tokens += [t.token for t in part.logprobs.content]
    assert text == choice.message.content
    assert tokens == [t.token for t in told]
    assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.feature("n and echo")
def test_completions_echo_and_several_choices(client):
    prompt = "The capital of France is"
    options = dict(model=MODEL, prompt=prompt, max_tokens=8, temperature=0.0)
    plain = client.completions.create(**options).choices[0].text
    echoed = client.completions.create(**options, echo=True, logprobs=1).choices[0]
    assert echoed.text == prompt + plain
    assert "".join(echoed.logprobs.tokens) == echoed.text
    assert echoed.logprobs.token_logprobs[0] is None
    several = client.completions.create(**options | {"temperature": 1.0}, n=3, seed=7)
    texts = [c.text for c in several.choices]
    assert len(set(texts)) > 1
    again = client.completions.create(**options | {"temperature": 1.0}, n=3, seed=7)
    assert [c.text for c in again.choices] == texts
    stopped = client.completions.create(**options, stop=plain[3:6]).choices[0]
    assert stopped.text == plain[: plain.index(plain[3:6])] and stopped.finish_reason == "stop"


def test_schema_and_tool_calls(client):
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    answer = chat(client, "Name a city as JSON.", response_format=schema, max_tokens=48)
    assert json.loads(answer.choices[0].message.content).keys() == {"city"}
    forced = {"type": "function", "function": {"name": "visit"}}
    options = dict(tools=[TOOL], tool_choice=forced, max_tokens=48)
    (call,) = chat(client, "Where to go?", **options).choices[0].message.tool_calls
    assert call.function.name == "visit"
    json.loads(call.function.arguments)
    arguments = ""
    for chunk in chat(client, "Where to go?", **options, stream=True):
        for part in chunk.choices:
            for piece in part.delta.tool_calls or ():
                arguments += piece.function.arguments or ""
    assert arguments == call.function.arguments


def structured(**options) -> dict:
    return dict(extra_body={"structured_outputs": options})


BAD = {
    "regex": structured(regex="(a"),
    "regex that refers back": structured(regex=r"(a)\1"),
    "grammar": structured(grammar="root ::= ("),
    "grammar without a root": structured(grammar='other ::= "a"'),
    "choices of none": structured(choice=[]),
    "schema": dict(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object", "properties": 5}},
        }
    ),
    "logprobs": dict(logprobs=True, top_logprobs=10_000),
    "prompt logprobs": dict(extra_body={"prompt_logprobs": 10_000}),
    "logprobs of tokens": dict(logprobs=True, extra_body={"logprob_token_ids": [5]}),
    "temperature": dict(temperature=-3.0),
    "choices": dict(n=0),
    "length": dict(messages=ask("word " * MAX_MODEL_LEN)),
    "empty": dict(messages=[]),
    "model": dict(model="nobody"),
    "stop": dict(max_tokens=-1),
    # What a worker has no room for: it would raise, and the engine end.
    "stop tokens": dict(extra_body={"stop_token_ids": list(range(3, 203)), "min_tokens": 1}),
    "allowed tokens": dict(extra_body={"allowed_token_ids": list(range(3, 1503))}),
    "biases": dict(logit_bias={str(i): 1.0 for i in range(3, 1503)}),
    "bad words": dict(extra_body={"bad_words": ["word" * 90 + str(i) for i in range(60)]}),
    # Of the completions API.
    "longest prompt": dict(prompt=[5] * MAX_MODEL_LEN),
    "empty prompt": dict(prompt=""),
    "prompt of no tokens": dict(prompt=[[]]),
    "unknown token": dict(prompt=[10**6]),
}
# Cost little though they are made to cost much: automata are not built in advance.
EXPLOSIVE = ("(.*a.{30})+b", "(x+x+)+y", "((((a{1,64}){1,64}){1,64}){1,64}){1,64}")


def garbage(client, options: dict) -> int:
    """The status a bad request ends with."""
    with pytest.raises(openai.APIStatusError) as error:
        if "prompt" in options:
            client.completions.create(**{"model": MODEL, "max_tokens": 4} | options)
        else:
            base = {"model": MODEL, "messages": ask("Hello"), "max_tokens": 4}
            client.chat.completions.create(**base | options)
    return error.value.status_code


def test_each_bad_request_leaves_the_next_alone(client):
    wanted = chat(client, "Hello", max_tokens=2).choices[0].message.content
    for name, options in BAD.items():
        assert garbage(client, options) // 100 == 4, name
        found = chat(client, "Hello", max_tokens=2).choices[0].message.content
        assert found == wanted, name


@pytest.mark.parametrize("regex", EXPLOSIVE)
def test_explosive_regexes_are_served(client, regex):
    chat(client, "Hello", max_tokens=4, timeout=20, **structured(regex=regex))


def test_the_longest_prompt_that_fits_has_an_answer(client):
    prompt = [5] * (MAX_MODEL_LEN - 1)
    options = dict(model=MODEL, prompt=prompt, max_tokens=1, temperature=0.0)
    answer = client.completions.create(**options)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 1)


def test_bad_requests_fail_alone(client):
    """Among 20 clients at once, whose answers are what each gets alone."""
    questions = [f"What is {i} plus {i}?" for i in range(5)]
    alone = [chat(client, q, max_tokens=12).choices[0].message.content for q in questions]
    with ThreadPoolExecutor(20 + len(BAD)) as pool:
        bad = {name: pool.submit(garbage, client, options) for name, options in BAD.items()}
        good = [pool.submit(chat, client, questions[i % 5], max_tokens=12) for i in range(20)]
        assert {n: f.result() // 100 for n, f in bad.items()} == dict.fromkeys(BAD, 4)
        found = [f.result().choices[0].message.content for f in good]
    assert found == [alone[i % 5] for i in range(20)]


def test_bench_and_metrics(url, client):
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += ["--base-url", url, "--model", MODEL, "--tokenizer", str(real_pair.target())]
    command += ["--dataset-name", "random", "--num-prompts", "3"]
    command += ["--random-input-len", "12", "--random-output-len", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Successful requests:                     3" in done.stdout
    metrics = spec_metrics(url)
    values = {name: value for name, _, value in metrics}
    accepted = values["vllm:spec_decode_num_accepted_tokens_total"]
    spine = values["vllm:spec_decode_num_accepted_spine_tokens_total"]
    assert 0 < spine < accepted
    positions = [name for name, _, _ in metrics if name.endswith("per_pos_total")]
    assert len(positions) == 15  # depths of the tree, not its nodes
