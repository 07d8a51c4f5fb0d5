"""A small folder of text files that the data tests read."""

import numpy as np
import pytest


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """Twelve sub-folders of five files; every file's text is unlike all others'."""
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)

    for source in range(12):
        folder = root / f"source{source:02d}"
        folder.mkdir()
        for index in range(5):
            words = rng.integers(0, 10**6, size=rng.integers(40, 120))
            text = f"s{source} f{index} " + " ".join(map(str, words)) + "\n"
            (folder / f"file{index}.txt").write_text(text)
    return root


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Where the tests' corpora are prepared, once per session."""
    return str(tmp_path_factory.mktemp("prepared"))
