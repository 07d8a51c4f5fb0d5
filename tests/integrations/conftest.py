"""What only the trainers' own environments can import is not collected."""

collect_ignore = [
    "maxtext_job.py",
    "tunix_job.py",
    "kauldron_job.py",
    "levanter_job.py",
    "levanter_region.py",
]
