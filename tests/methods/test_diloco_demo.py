"""DiLoCo with decoupled momentum."""

import numpy as np


def momentum_after(num_regions, is_over_senders, num_rounds=60):
    """Its length in NumPy, where random pseudo-gradients of length 64 come in.

    b 0.95, 32 of 4096. The cosine transform is left out: it turns random numbers into
    random numbers.
    """
    rng, d = np.random.default_rng(0), np.zeros((num_regions, 4096))
    for _ in range(num_rounds):
        d = 0.95 * d + rng.normal(size=d.shape)
        sent = np.zeros(d.shape, bool)
        top = np.argpartition(-np.abs(d), 32, axis=1)[:, :32]
        np.put_along_axis(sent, top, True, axis=1)
        total, senders = np.where(sent, d, 0).sum(0), sent.sum(0)
        mean = total / (np.maximum(senders, 1) if is_over_senders else num_regions)
        d = np.where(sent, 0, d) + mean
    return np.linalg.norm(d, axis=1).max()


def test_why_the_mean_is_over_all_regions():
    """Over senders, what one region of four sends comes back whole to all four.

    The next round it is in everyone's top, and grows; of two regions it does not.
    """
    free = 64 / np.sqrt(1 - 0.95**2)  # Of a momentum that nobody shares.
    for num_regions in (2, 4):
        assert momentum_after(num_regions, False) < 1.5 * free
    assert momentum_after(2, True) < 1.5 * free
    assert momentum_after(4, True) > 1e10
