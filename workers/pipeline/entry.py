"""Process set-up of the pipeline, before anything heavy is imported."""

import argparse
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workers.pipeline.emit import Emit, JsonLines
from workers.pipeline.failure import (
    PipelineFailure,
    Stopped,
    is_out_of_memory,
    is_storage_full,
)
from workers.pipeline.ranks import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    PARENT_VARIABLE,
    lost_rank,
    other_ranks,
    rank,
)

PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """Run one command of the child process and return its exit code."""
    _die_with_parent()
    # Of the processes that share a job only the first one speaks.
    emit: Emit = JsonLines(_claim_stdout()) if rank() == 0 else _silent
    stopping = {"now": False}

    def on_signal(_number: int, _frame: Any) -> None:
        stopping["now"] = True

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    command = _parse(arguments)
    return guarded(lambda: command(emit, lambda: stopping["now"]), emit)


def _silent(event: str, **fields: Any) -> None:
    return None


def guarded(action: Callable[[], object], emit: Emit) -> int:
    """Run an action; every way of ending becomes an event and an exit code."""
    try:
        action()
    except Stopped:
        return EXIT_STOPPED
    except PipelineFailure as failure:
        _fail(emit, failure)
    except MemoryError:
        _fail(emit, _out_of_memory())
    except Exception as error:
        if is_storage_full(error):
            _fail(
                emit,
                PipelineFailure(
                    "storage_full",
                    "The worker's disk is full. Free space; the job goes on by itself.",
                    retryable=True,
                ),
            )
        elif is_out_of_memory(error):
            _fail(emit, _out_of_memory())
        else:
            _unexpected(emit, error)
    else:
        return EXIT_DONE
    return EXIT_FAILED


def _fail(emit: Emit, failure: PipelineFailure) -> None:
    emit(
        "failure",
        code=failure.code,
        message=failure.message,
        param=failure.param,
        retryable=failure.retryable,
        details=failure.details,
    )


def _unexpected(emit: Emit, error: Exception) -> None:
    # The text of an unexpected error may quote a tenant's data: it stays in the worker's log.
    traceback.print_exception(error)
    _fail(
        emit,
        PipelineFailure(
            "internal_error",
            f"The pipeline stopped with an unexpected {type(error).__name__}. The "
            "worker's log holds the details (in a service: `tunegate jobs log`).",
            retryable=True,
        ),
    )


def _out_of_memory() -> PipelineFailure:
    return PipelineFailure(
        "out_of_memory",
        "The worker ran out of memory. Lower batch_size, shorten the longest examples, or use a "
        "worker with more memory.",
    )


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, and leave if it already has."""
    expected = os.environ.get(PARENT_VARIABLE)
    if sys.platform != "linux" or expected is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(expected):
        sys.exit(EXIT_STOPPED)


def _claim_stdout() -> Any:
    """Keep standard output for events: whatever else prints goes to standard error."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return stream


Command = Callable[[Emit, Callable[[], bool]], object]


def _parse(arguments: Sequence[str]) -> Command:
    if arguments[:1] == ["align"]:
        return _align_command(arguments[1:])
    if arguments[:1] == ["perturbation"]:
        return _perturbation_command(arguments[1:])
    if arguments[:1] == ["scheduler"]:
        return _scheduler_command(arguments[1:])
    if arguments[:1] == ["gate"]:
        return _gate_command(arguments[1:])
    if arguments[:1] == ["analysis"]:
        return _analysis_command(arguments[1:])
    if arguments[:1] == ["analyze"]:
        return _analyze_command(arguments[1:])
    if arguments[:1] == ["run"]:
        parser = argparse.ArgumentParser(prog="python -m workers.pipeline run")
        parser.add_argument("spec", type=Path)
        parser.add_argument("--out", type=Path, required=True)
        options = parser.parse_args(arguments[1:])
        return lambda emit, stop: _run_local(options.spec, options.out, emit, stop)
    parser = argparse.ArgumentParser(prog="python -m workers.pipeline")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args(arguments)
    return lambda emit, stop: _run_attempt(options.spec, options.work, emit, stop)


def _run_attempt(spec_path: Path, work: Path, emit: Emit, stop: Callable[[], bool]) -> None:
    from jobspec.spec import JobSpec

    spec = JobSpec.model_validate_json(spec_path.read_bytes())
    with other_ranks(spec.model.processes, lost_rank(emit, EXIT_FAILED)):
        from workers.pipeline.processes import joined
        from workers.pipeline.run import run_job

        with joined() as processes:
            run_job(spec, work, emit, stop, processes)


def _run_local(spec_path: Path, out: Path, emit: Emit, stop: Callable[[], bool]) -> None:
    from workers.pipeline.local import read_spec, run_local

    spec = read_spec(spec_path)
    with other_ranks(spec.model.processes, lost_rank(emit, EXIT_FAILED)):
        from workers.pipeline.processes import joined

        with joined() as processes:
            run_local(spec, out, emit, stop, processes)


def _align_command(arguments: Sequence[str]) -> Command:
    parser = argparse.ArgumentParser(prog="python -m workers.pipeline align")
    parser.add_argument("base")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--harmless", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--catalogue", type=Path)
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args(arguments)

    def command(emit: Emit, stop: Callable[[], bool]) -> None:
        from workers.pipeline.local import run_align

        run_align(options, emit, stop)

    return command


def _gate_command(arguments: Sequence[str]) -> Command:
    parser = argparse.ArgumentParser(prog="python -m workers.pipeline gate")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)

    def command(emit: Emit, stop: Callable[[], bool]) -> None:
        from jobspec.gate_run import GateRunSpec
        from workers.pipeline.gate_run import run_gate

        spec = GateRunSpec.model_validate_json(options.spec.read_bytes())
        run_gate(spec, options.work, emit, stop, options.out)

    return command


def _analysis_command(arguments: Sequence[str]) -> Command:
    parser = argparse.ArgumentParser(prog="python -m workers.pipeline analysis")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args(arguments)

    def command(emit: Emit, stop: Callable[[], bool]) -> None:
        from jobspec.analysis import AnalysisSpec
        from workers.pipeline.analysis import run_analysis_spec

        spec = AnalysisSpec.model_validate_json(options.spec.read_bytes())
        run_analysis_spec(spec, options.work, emit, stop)

    return command


def _analyze_command(arguments: Sequence[str]) -> Command:
    parser = argparse.ArgumentParser(prog="python -m workers.pipeline analyze")
    parser.add_argument("kind")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--file", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--training-file", type=Path)
    parser.add_argument("--base")
    parser.add_argument("--catalogue", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    def command(emit: Emit, stop: Callable[[], bool]) -> None:
        from workers.pipeline.analysis import run_local_analysis
        from workers.pipeline.analysis_input import local_spec

        pairs = (item.partition("=") for item in options.file)
        spec = local_spec(
            options.kind,
            options.input,
            files={name: Path(path) for name, _, path in pairs},
            bundle=options.bundle,
            training_file=options.training_file,
            base=options.base,
            catalogue=options.catalogue,
            seed=options.seed,
        )
        run_local_analysis(spec, options.out, emit, stop)

    return command


def _perturbation_command(arguments: Sequence[str]) -> Command:
    parser = argparse.ArgumentParser(prog="python -m workers.pipeline perturbation")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show")
    rescale = commands.add_parser("rescale")
    for command_parser in (show, rescale):
        command_parser.add_argument("bundle", type=Path)
    rescale.add_argument("--scale", type=float, required=True)
    rescale.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)

    def command(emit: Emit, stop: Callable[[], bool]) -> None:
        from workers.pipeline import stored_perturbation

        if options.command == "show":
            emit("result", **stored_perturbation.describe_perturbation(options.bundle))
        else:
            emit(
                "result",
                **stored_perturbation.rescale_perturbation(
                    options.bundle, options.scale, options.out
                ),
            )

    return command


def _scheduler_command(arguments: Sequence[str]) -> Command:
    parser = argparse.ArgumentParser(prog="python -m workers.pipeline scheduler")
    score = parser.add_subparsers(dest="command", required=True).add_parser("score")
    score.add_argument("folder", type=Path)
    score.add_argument("--input", type=Path, required=True)
    score.add_argument("--out", type=Path, required=True)
    score.add_argument("--model")
    score.add_argument("--catalogue", type=Path)
    score.add_argument("--cache", type=Path)
    options = parser.parse_args(arguments)

    def command(emit: Emit, stop: Callable[[], bool]) -> None:
        from jobspec.cache import default_cache_dir
        from workers.pipeline.score_rows import score_file

        def progress(done: int, total: int) -> None:
            if stop():
                raise Stopped
            emit("progress", stage="scoring", done=done, total=total)

        found = score_file(
            options.folder,
            options.input,
            options.out,
            model=options.model,
            catalogue=options.catalogue,
            cache_dir=options.cache or default_cache_dir(),
            progress=progress,
        )
        emit("result", **found)

    return command
