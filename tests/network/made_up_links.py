"""Made-up links: equal ones, each pair with its own, and random ones."""

import numpy as np
from hypothesis import strategies as st

from cocodc_jax.network.links import LinkState


def own_links(num, delay_s, bytes_per_s=1e6):
    """Equal links without a shared line."""
    rate = np.full((num, num), float(bytes_per_s))
    np.fill_diagonal(rate, np.inf)
    return LinkState(rate, delay_s * (1 - np.eye(num)))


def random_links(num, seed, longest_s=0.0):
    random = np.random.default_rng(seed)
    rate = random.uniform(1e7, 1e9, (num, num))
    np.fill_diagonal(rate, np.inf)
    return LinkState(rate, random.uniform(0, longest_s, (num, num)))


@st.composite
def states(draw, max_regions):
    num = draw(st.integers(2, max_regions))
    rate = draw(st.lists(st.floats(1e6, 1e9), min_size=num**2, max_size=num**2))
    delay = draw(st.lists(st.floats(0, 1), min_size=num**2, max_size=num**2))
    rate = np.reshape(rate, (num, num))
    delay = np.reshape(delay, (num, num))
    np.fill_diagonal(rate, np.inf)
    np.fill_diagonal(delay, 0.0)
    return LinkState(rate, delay)
