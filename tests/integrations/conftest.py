"""Modules that only the trainers' environments can import are not collected."""

collect_ignore = [
    "maxtext_job.py",
    "tunix_job.py",
    "kauldron_job.py",
    "levanter_job.py",
    "levanter_region.py",
]
