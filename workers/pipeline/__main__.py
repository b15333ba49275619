"""The child process.

    python -m workers.pipeline SPEC.json --work DIR            one attempt of a job
    python -m workers.pipeline run SPEC.yaml --out DIR         the same without a service
    python -m workers.pipeline gate SPEC.json --work DIR [--out DIR]   a gate run
    python -m workers.pipeline analysis SPEC.json --work DIR   one attempt of an analysis
    python -m workers.pipeline analyze KIND --input FILE --out DIR   the same without a service
    python -m workers.pipeline align BASE --data FILE --out DIR   an alignment adapter
    python -m workers.pipeline perturbation show|rescale BUNDLE   a bundle's perturbation
    python -m workers.pipeline scheduler score FOLDER --input FILE --out FILE   weights of rows

Standard output carries events, one JSON object a line; everything else goes to standard error.
Exit codes: 0 done, 10 failed for a reason that was sent as an event, 15 stopped by SIGTERM.
"""

import sys

from workers.pipeline.entry import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
