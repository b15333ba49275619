"""What a fine-tuning job is made of: training-file format, base models, defense options, job spec.

The bottom room of the house: pydantic and the standard library only, so that the gateway (which
validates a job), the supervisor (which writes its spec) and the pipeline (which reads it) share
one definition of each.
"""
