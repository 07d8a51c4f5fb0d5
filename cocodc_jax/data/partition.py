"""Which training documents each region reads: disjoint sets, fixed for a whole run.

`iid` deals documents in turn. They are stored in the order of a hash, so every region
gets a random sample of equal size (in documents). `source` deals whole sources, the
largest first and each to the region that has the fewest bytes so far, which is the
longest-processing-time rule for balancing loads (Graham, 1969).
"""

import collections
from collections.abc import Mapping, Sequence

from cocodc_jax.data.config import Partition
from cocodc_jax.data.corpora.documents import Corpus


def region_documents(
    corpus: Corpus, partition: Partition, num_regions: int
) -> list[Sequence[int]]:
    """Deal the training documents to regions.

    Raises:
      ValueError: if documents have no source, or there are fewer sources than regions.
    """
    if partition == "iid":
        return [range(r, len(corpus.train), num_regions) for r in range(num_regions)]
    if not corpus.has_sources:
        raise ValueError(
            "partition='source' needs documents with a feature 'source', which this "
            "TFDS set lacks; use partition='iid'"
        )
    members, sizes = collections.defaultdict(list), collections.Counter()
    for index in range(len(corpus.train)):
        source, num_bytes = corpus.train.source_and_bytes(index)
        members[source].append(index)
        sizes[source] += num_bytes
    return [
        sorted(index for source in sources for index in members[source])
        for sources in deal_sources(sizes, num_regions)
    ]


def deal_sources(sizes: Mapping[str, int], num_regions: int) -> list[list[str]]:
    """Deal sources to regions, balanced by size.

    >>> deal_sources({"a": 5, "b": 3, "c": 3, "d": 1}, num_regions=2)
    [['a', 'd'], ['b', 'c']]

    Raises:
      ValueError: if there are fewer sources than regions.
    """
    if len(sizes) < num_regions:
        raise ValueError(
            f"partition='source' needs a source for each of num_regions={num_regions} "
            f"regions, and the corpus has {len(sizes)}: {', '.join(sorted(sizes))}"
        )
    dealt: list[list[str]] = [[] for _ in range(num_regions)]
    loads = [0] * num_regions
    for source in sorted(sizes, key=lambda name: (-sizes[name], name)):
        # A region without a source comes first even where sizes are zero.
        region = min(range(num_regions), key=lambda r: (loads[r], len(dealt[r]), r))
        dealt[region].append(source)
        loads[region] += sizes[source]
    return dealt
