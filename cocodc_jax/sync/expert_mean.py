"""The mean of a mixture's experts, each weighted by the tokens that it saw.

Regions that train on different text use different experts. An expert that saw no token
in a region has moved there only by weight decay and old momentum, and pulls a plain
mean towards its stale value. With c^m_e the tokens that expert e saw in region m since
its parameters were last replaced by outer ones, in batches,

    Delta_e = sum_m w_m c^m_e Delta^m_e / sum_m w_m c^m_e
    Delta_e = 0                                                    if all c^m_e are 0

so an expert that no region trained stays as it is, except for the outer optimizer's
momentum. w_m are the regions' weights. All other leaves have plain means.

The counts are a leaf of the parameters, `experts/tokens` (`models.experts`), so they
are part of a message anyway: 4 bytes an expert and layer. Outer parameters hold none
(`core.sync.outer_step`), so a region counts only its own progress.

Source: ours. Several federated mixtures leave an expert out in regions where it got no
token (from memory).
"""

import dataclasses

import jax
import jax.numpy as jnp

from cocodc_jax.expert_leaves import TOKEN_UNIT, count_of, expert_axis, is_token_count
from cocodc_jax.sync.averages import Average
from cocodc_jax.sync.fragments import Fragment, PyTree
from cocodc_jax.sync.messages import Compressed, Message
from cocodc_jax.transforms.compressor import Compressor


@dataclasses.dataclass(frozen=True)
class ExpertMean(Average):
    """The weighted mean, for experts weighted by their tokens.

    If messages are encoded, counts multiply the decoded messages. Residuals then do not
    contain the counts, so rounds of many tokens do not leave longer ones.
    """

    is_encoded: bool = False

    is_linear = False

    def check_compressor(self, compressor: Compressor) -> None:
        """Refuse any, as residuals and counts would be encoded together."""
        raise ValueError("its mean is by tokens already; compress first")

    def before(self, part: Fragment, key: jax.Array | None) -> Fragment:
        """Return pseudo-gradients times counts, or as encoded; see `Average.before`."""
        return part if self.is_encoded else self.times_counts(part)

    def times_counts(self, part: Fragment) -> Fragment:
        """Return pseudo-gradients times counts."""
        return {path: x * self._counts(path, x, part) for path, x in part.items()}

    def after(self, mean: PyTree, like: PyTree, key: jax.Array | None) -> Fragment:
        """Return means by tokens, and the mean counts; see `Average.after`."""
        means = dict(mean)
        for path, x in mean.items():
            total = self._counts(path, x, mean)
            if not isinstance(total, int):
                share = x / jnp.where(total > 0, total, 1)
                means[path] = jnp.where(total > 0, share, 0)
        return means

    def _counts(self, path: str, x: jax.Array, part: Fragment) -> jax.Array | int:
        """Return counts that broadcast to a leaf of experts; 1 for other leaves."""
        if is_token_count(path) or expert_axis(path) is None:
            return 1
        if count_of(path) not in part:
            raise ValueError(
                f"expert_weights='tokens' needs {count_of(path)!r} in the fragment of "
                f"{path!r}; pass fragment_strategy='strided' or 'experts'"
            )
        # A pseudo-gradient is old minus new.
        counts = jnp.maximum(-part[count_of(path)] / TOKEN_UNIT, 0)
        return counts.reshape(counts.shape + (1,) * (x.ndim - counts.ndim))


def with_expert_mean(message: Message) -> Message:
    """Return a message with an `ExpertMean`; it must have every entry."""
    if message.average not in (Average(), ExpertMean()):
        raise ValueError("its mean is not of pseudo-gradients")

    compressor = message.compressor()
    average = ExpertMean(is_encoded=True)
    if compressor is None:
        if message.only_weighted:
            raise ValueError("what it keeps would be of updates times tokens")
        return dataclasses.replace(message, average=ExpertMean())
    if not isinstance(message, Compressed) or compressor.is_sparse:
        raise ValueError("its messages do not have every entry, nor every count")

    return dataclasses.replace(message, by=counts_exact(compressor), average=average)


def counts_exact(compressor: Compressor) -> Compressor:
    """Return a compressor that sends counts uncompressed, and multiplies by them."""

    def split(tree: Fragment) -> tuple[Fragment, Fragment]:
        counts = {path: x for path, x in tree.items() if is_token_count(path)}
        return counts, {path: x for path, x in tree.items() if path not in counts}

    def init(tree: Fragment) -> PyTree:
        _, rest = split(tree)
        return compressor.init(rest)

    def encode(
        tree: Fragment, memory: PyTree, key: jax.Array | None = None
    ) -> tuple[PyTree, PyTree]:
        counts, rest = split(tree)
        message, memory = compressor.encode(rest, memory, key)
        return (counts, message), memory

    def decode(message: PyTree) -> Fragment:
        counts, rest = message
        return ExpertMean().times_counts(compressor.decode(rest) | counts)

    return dataclasses.replace(compressor, init=init, encode=encode, decode=decode)
