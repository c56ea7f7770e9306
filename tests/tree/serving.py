"""`vllm serve` with trees, for tests that are its clients."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from conftest import MODE

START_SECONDS = 240


def flags(options: dict) -> list[str]:
    """Options of an engine as the command line has them."""
    found = []
    for name, value in options.items():
        if value is False:
            continue
        found.append(f"--{name.replace('_', '-')}")
        if value is not True:
            found.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return found


@contextmanager
def server(target: str, drafter: str, num_tokens: int, log: Path, **options):
    """The address of a server that verifies trees; it must still run at the end."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    speculative_config = {
        "method": "ddtree",
        "model": drafter,
        "num_speculative_tokens": num_tokens,
        **MODE.speculative_config,
    }
    defaults = MODE.options | {
        "host": "127.0.0.1",
        "port": port,
        "block_size": 32,
        "speculative_config": speculative_config,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", target]
    command += flags(defaults | options)
    env = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as f:
        process = subprocess.Popen(command, env=env, stdout=f, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(2 * START_SECONDS):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                client_of(url).models.list()
                break
            except openai.APIConnectionError:
                time.sleep(0.5)
        else:
            pytest.fail(log.read_text()[-3000:])
        yield url
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def spec_metrics(url: str) -> list[tuple[str, str, float]]:
    """The server's metrics of speculation: name, labels and value."""
    import httpx

    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = []
    for line in lines:
        if line.startswith("vllm:spec_decode_num"):
            name, labels = line.split("{")[0], line[line.index("{") : line.index("}") + 1]
            found.append((name, labels, float(line.split()[-1])))
    return found
