"""A judge in a process of its own: `python -m evaluators.harmfulness.serve OPTIONS`.

OPTIONS are JudgeOptions as JSON. Standard input brings one JSON object a line, {"prompts": [...],
"responses": [...]} of equal length; standard output gives one for each, {"judgements": [...]} or
{"error": name}. Before all others comes {"ready": {"id", "version", "threshold"}}, or {"error":
reason} and the end. The process ends when its input does, so never outlives who started it.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter

from evaluators.harmfulness.contract import HarmJudge
from jobspec.judging import JudgeOptions

_OPTIONS: TypeAdapter[JudgeOptions] = TypeAdapter(JudgeOptions)

Say = Callable[[dict[str, Any]], None]


def load(options: JudgeOptions) -> HarmJudge:
    """The judge of these options, ready to judge."""
    from evaluators.harmfulness.scorer import EmbeddedScorer
    from evaluators.judges import load_judge

    return load_judge(options, EmbeddedScorer.load())


def serve(judge: HarmJudge, lines: Iterable[bytes], say: Say) -> None:
    """Answer every line. A request that cannot be answered does not end the process."""
    say({"ready": {"id": judge.id, "version": judge.version, "threshold": judge.threshold}})
    for line in lines:
        try:
            request = json.loads(line)
            judgements = judge.judge(request["prompts"], request["responses"])
            say({"judgements": [judgement.model_dump(mode="json") for judgement in judgements]})
        except Exception as error:
            # The text of an error may quote what was judged.
            say({"error": type(error).__name__})


def main(arguments: Sequence[str]) -> int:
    """Serve until standard input ends; 1 when there is no judge to serve."""
    say = _claim_stdout()
    try:
        judge = load(_OPTIONS.validate_json(arguments[0]))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    serve(judge, sys.stdin.buffer, say)
    return 0


def _claim_stdout() -> Say:
    """Keep standard output for answers: whatever else prints goes to standard error."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def say(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    return say


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
