"""Where outputs of executed pages are kept, by what they are made of."""

import hashlib
import pathlib
import shutil

READ = (
    "cocodc_jax/**/*.py",
    "experiments/**/*.py",
    "experiments/**/*.toml",
    "experiments/**/*.yaml",
    "experiments/results/*.json",
    "docs/tables.py",
    "docs/claims_plot.py",
)


def folder(docs: pathlib.Path) -> pathlib.Path:
    """Return the folder of the cache for the code and the results as they are now.

    Outputs of other code and results are removed.
    """
    digest = hashlib.sha256()
    for pattern in READ:
        for path in sorted(docs.parent.glob(pattern)):
            digest.update(f"{path.relative_to(docs.parent)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())

    caches = docs / ".jupyter_cache"
    current = caches / digest.hexdigest()[:16]
    for other in caches.glob("*"):
        if other != current:
            shutil.rmtree(other)
    return current
