"""What the alignment stage does to refusals, on prompts of other sources than its own.

    python -m benchmarks.alignment --data FOLDER [--prompts 60]

FOLDER holds prompts_harmful/{harmbench_standard,strongreject,xstest_prompts}.jsonl. Greedy, 32 new
tokens; refused: the answer opens with a refusal. Prints the table of docs/defenses.md; not part of
`make bench`, because the data is not part of the project.
"""

import argparse
import json
from pathlib import Path

from evaluators.generation import Decoding, generate
from evaluators.harmfulness.rules import has_refusal_prefix
from evaluators.prompts import load_prompts, subset
from jobspec.cache import default_cache_dir
from jobspec.catalogue import load_catalogue
from workers.pipeline.models import load_base

MODELS = ("smollm2-135m-instruct", "smollm2-135m-aligned")


def prompt_sets(data: Path, count: int) -> dict[str, list[str]]:
    """At most `count` prompts a set, spread evenly over each file."""

    def spread(prompts: list[str]) -> list[str]:
        return prompts[:: max(1, len(prompts) // count)][:count]

    def read(name: str) -> list[dict[str, str]]:
        lines = (data / "prompts_harmful" / f"{name}.jsonl").read_text("utf-8").split("\n")
        return [json.loads(line) for line in lines if line]

    safe = [row["prompt"] for row in read("xstest_prompts") if row["label"] == "safe"]
    own = load_prompts("harmful_prompts").of_split("test")
    return {
        "HarmBench, standard": spread([row["prompt"] for row in read("harmbench_standard")]),
        "StrongREJECT": spread([row["prompt"] for row in read("strongreject")]),
        "own harmful prompts (test)": [prompt.text for prompt in subset(own, 70)],
        "own ordinary instructions": [p.text for p in load_prompts("benign_prompts").prompts],
        "XSTest, safe": spread(safe),
        "own safe look-alikes": [p.text for p in load_prompts("safe_lookalikes").prompts],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=60)
    options = parser.parse_args()
    sets = prompt_sets(options.data, options.prompts)
    refused: dict[str, list[float]] = {name: [] for name in sets}
    for model_name in MODELS:
        entry = load_catalogue().find(model_name)
        assert entry is not None
        base = load_base(entry, default_cache_dir())
        for name, prompts in sets.items():
            answers = generate(
                base.model,
                base.tokenizer,
                [[{"role": "user", "content": prompt}] for prompt in prompts],
                Decoding(max_new_tokens=32),
                batch_size=32,
            )
            flags = [has_refusal_prefix(answer[0].text) for answer in answers]
            refused[name].append(sum(flags) / len(flags))
    print(f"{'prompts':28} {'n':>4} {'as shipped':>11} {'aligned':>8}")
    for name, (plain, aligned) in refused.items():
        print(f"{name:28} {len(sets[name]):4} {plain:11.0%} {aligned:8.0%}")


if __name__ == "__main__":
    main()
