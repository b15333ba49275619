"""A fine-tuning job through tunegate with the unmodified OpenAI client.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=sk-tg-... python examples/client.py FILE
"""

import sys
import time

from openai import OpenAI

client = OpenAI()
with open(sys.argv[1], "rb") as rows:
    training = client.files.create(file=rows, purpose="fine-tune")
job = client.fine_tuning.jobs.create(
    model="smollm2-135m-aligned",
    training_file=training.id,
    suffix="example",
    # What OpenAI does not have goes through extra_body; leave it out for the defaults.
    extra_body={"defense": {"scheduler": "bds", "perturbation": "post_hoc"}},
)
while job.status not in ("succeeded", "failed", "cancelled"):
    time.sleep(2)
    job = client.fine_tuning.jobs.retrieve(job.id)
    print(job.status, job.stage)
print(job.fine_tuned_model or job.error)
