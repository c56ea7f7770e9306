"""Answer three prompts without speculation, with the drafter's chain and with its trees.

Run by scripts/demo.sh in the environment that holds the patched vLLM. Prints the answers, a
table of tokens per step and one step's draft tree; exits 1 if the texts differ.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draft_tree_page import write_page
from draft_tree_view import Generation, Step, Trace, pick_step, read_trace, render_tree

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Give me three tips for learning a new language.",
    "Write a Python function that adds two numbers.",
)
CHAIN, TREES = 15, (15, 31, 63)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target", type=Path, required=True, help="Hugging Face folder of the target"
    )
    parser.add_argument("--drafter", type=Path, required=True, help="folder of the DFlash drafter")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer, in tokens")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--html", type=Path, help="also draw every step's tree in this page")
    args = parser.parse_args()

    import torch

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

    modes = [("no speculation", None), (f"chain, k={CHAIN}", ("dflash", CHAIN))]
    modes += [(f"tree, B={n}", ("ddtree", n)) for n in TREES]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        # The largest tree is the one to look at.
        trace_file = Path(folder) / "trace.jsonl"
        for i, (name, method) in enumerate(modes, 1):
            print(f"[{i}/{len(modes)}] {name} ...", end=" ", file=sys.stderr, flush=True)
            begin = time.monotonic()
            traced = trace_file if i == len(modes) else None
            results.append({"mode": name} | answer(args, method, traced))
            print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        trace = read_trace(trace_file)

    equal = all(r["tokens"] == results[0]["tokens"] for r in results)
    report(results, equal)
    draw(args, trace, results[-1]["tokens"])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0 if equal else 1


def answer(
    args: argparse.Namespace, method: tuple[str, int] | None, trace_file: Path | None
) -> dict:
    """Run the three prompts in one batch; greedy, so that texts can be compared."""
    # The engine writes notices of its own to stdout, which belongs to the answers.
    with contextlib.redirect_stdout(sys.stderr):
        from vllm import LLM, SamplingParams

        speculative_config = None
        if method:
            speculative_config = {
                "method": method[0],
                "model": str(args.drafter),
                "num_speculative_tokens": method[1],
            }
            if trace_file:
                speculative_config["draft_tree_trace"] = str(trace_file)
        llm = LLM(
            str(args.target),
            speculative_config=speculative_config,
            # Near-ties of bf16 fall differently for batches of different shapes.
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=len(QUESTIONS),
            max_num_batched_tokens=1024,
            enforce_eager=True,
            kv_cache_memory_bytes=256 << 20,
            disable_log_stats=False,
        )
        try:
            begin = time.monotonic()
            outputs = llm.chat(
                [[{"role": "user", "content": q}] for q in QUESTIONS],
                SamplingParams(temperature=0.0, max_tokens=args.max_tokens),
                use_tqdm=False,
            )
            seconds = time.monotonic() - begin
            counts = {
                m.name.removeprefix("vllm:spec_decode_num_"): m.value
                for m in llm.get_metrics()
                if m.name.startswith("vllm:spec_decode_num_") and hasattr(m, "value")
            }
        finally:
            llm.llm_engine.engine_core.shutdown()
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    made = sum(map(len, tokens))
    steps, rate = made - len(tokens), 1.0
    if counts.get("drafts"):
        # Accepted drafts and the bonus token of every verify step of a request.
        steps = int(counts["drafts"])
        rate = 1 + counts["accepted_tokens"] / counts["drafts"]
    return {
        "tokens": tokens,
        "texts": [o.outputs[0].text for o in outputs],
        "steps": steps,
        "tokens_per_step": rate,
        "tokens_per_second": made / seconds,
    }


def report(results: list[dict], equal: bool) -> None:
    import torch
    from rich.console import Console
    from rich.table import Table

    console = Console()
    # The interpreter's speed on a CPU says nothing.
    timed = torch.cuda.is_available()
    for question, text in zip(QUESTIONS, results[-1]["texts"], strict=True):
        console.print(f"\n[bold]{question}[/bold]")
        console.print(text.strip(), markup=False, highlight=False)
    table = Table(title="\nSmolLM2-135M-Instruct, greedy, three prompts in one batch")
    table.add_column("mode")
    table.add_column("tokens/step", justify="right")
    table.add_column("steps", justify="right")
    if timed:
        table.add_column("tokens/s", justify="right")
    table.add_column("answers")
    for result in results:
        same = result["tokens"] == results[0]["tokens"]
        table.add_row(
            result["mode"],
            f"{result['tokens_per_step']:.2f}",
            str(result["steps"]),
            *([f"{result['tokens_per_second']:.0f}"] if timed else []),
            "reference" if result is results[0] else "equal" if same else "[red]DIFFERENT[/red]",
        )
    console.print(table)
    console.print(
        "All texts are equal." if equal else "[red]The texts differ: this is a bug.[/red]"
    )


def draw(args: argparse.Namespace, trace: Trace, tokens: list[list[int]]) -> None:
    """Show one step's tree, and every step's in a page if one was asked for."""
    from rich.console import Console
    from transformers import AutoTokenizer

    if len(trace.requests) < len(QUESTIONS):
        print("The answers are too short for a tree to draw.", file=sys.stderr)
        return
    decode = AutoTokenizer.from_pretrained(args.target).decode
    # Requests are numbered in the order of the prompts.
    order = sorted(trace.requests, key=lambda name: int(name.partition("-")[0]))
    runs = [
        Generation(question, cut(trace.requests[request], answer))
        for question, request, answer in zip(QUESTIONS, order, tokens, strict=True)
    ]
    console = Console()
    best = pick_step([step for run in runs for step in run.steps])
    asked = next(run.question for run in runs if best in run.steps)
    console.print(f"\n[bold]One draft tree[/bold], from the answer to: {asked}")
    console.print(render_tree(best, decode, width=console.width))
    if args.html:
        header = replace(trace.header, target=args.target.name, drafter=args.drafter.name)
        write_page(args.html, runs, header, decode)
        console.print(f"Every step of the three answers: {args.html}")


def cut(steps: Sequence[Step], answer: list[int]) -> list[Step]:
    """The steps as far as the answer goes: a path may run past its end."""
    left, kept = len(answer) - 1, []
    for step in steps:
        if left <= 0:
            break
        if left < len(step.emitted):
            bonus = step.emitted[left - 1]
            step = replace(step, accepted=step.accepted[: left - 1], bonus=bonus)
        kept.append(step)
        left -= len(step.emitted)
    return kept


if __name__ == "__main__":
    sys.exit(main())
