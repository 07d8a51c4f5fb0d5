"""What a wheel holds: the package, and the programs as `cocodc_jax.experiments`.

They are `experiments` in a checkout; a package of that name would be rude in other
people's environments. All else is in pyproject.toml.
"""

from setuptools import find_packages, setup

programs = find_packages(include=["experiments", "experiments.*"])
setup(
    packages=[
        *find_packages(include=["cocodc_jax", "cocodc_jax.*"]),
        *(f"cocodc_jax.{name}" for name in programs),
    ],
    package_dir={"cocodc_jax.experiments": "experiments"},
)
