"""Answer three prompts without speculation, with the drafter's chain and with its trees.

Run by scripts/demo.sh in the environment that holds the patched vLLM. Prints the answers
and a table of tokens per step; exits 1 if the texts differ.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Give me three tips for learning a new language.",
    "Write a Python function that adds two numbers.",
)
CHAIN, TREES = 15, (15, 63)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target", type=Path, required=True, help="Hugging Face folder of the target"
    )
    parser.add_argument("--drafter", type=Path, required=True, help="folder of the DFlash drafter")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer, in tokens")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
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
    for i, (name, method) in enumerate(modes, 1):
        print(f"[{i}/{len(modes)}] {name} ...", end=" ", file=sys.stderr, flush=True)
        begin = time.monotonic()
        results.append({"mode": name} | answer(args, method))
        print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    equal = all(r["tokens"] == results[0]["tokens"] for r in results)
    report(results, equal)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0 if equal else 1


def answer(args: argparse.Namespace, method: tuple[str, int] | None) -> dict:
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
            outputs = llm.chat(
                [[{"role": "user", "content": q}] for q in QUESTIONS],
                SamplingParams(temperature=0.0, max_tokens=args.max_tokens),
                use_tqdm=False,
            )
            counts = {
                m.name.removeprefix("vllm:spec_decode_num_"): m.value
                for m in llm.get_metrics()
                if m.name.startswith("vllm:spec_decode_num_") and hasattr(m, "value")
            }
        finally:
            llm.llm_engine.engine_core.shutdown()
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    rate = 1.0
    if counts.get("drafts"):
        # Accepted drafts and the bonus token of every verify step of a request.
        rate = 1 + counts["accepted_tokens"] / counts["drafts"]
    return {
        "tokens": tokens,
        "texts": [o.outputs[0].text for o in outputs],
        "tokens_per_step": rate,
    }


def report(results: list[dict], equal: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for question, text in zip(QUESTIONS, results[-1]["texts"], strict=True):
        console.print(f"\n[bold]{question}[/bold]")
        console.print(text.strip(), markup=False, highlight=False)
    table = Table(title="\nSmolLM2-135M-Instruct, greedy, three prompts in one batch")
    table.add_column("mode")
    table.add_column("tokens/step", justify="right")
    table.add_column("answers")
    for result in results:
        same = result["tokens"] == results[0]["tokens"]
        table.add_row(
            result["mode"],
            f"{result['tokens_per_step']:.2f}",
            "reference" if result is results[0] else "equal" if same else "[red]DIFFERENT[/red]",
        )
    console.print(table)
    console.print(
        "All texts are equal." if equal else "[red]The texts differ: this is a bug.[/red]"
    )


if __name__ == "__main__":
    sys.exit(main())
