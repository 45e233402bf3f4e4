"""Fixtures that several folders of tests share; being here puts tests/ on the import path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor write the user's cache (remembered hashes and trees)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small bundle that really decodes. Do not write into it."""
    from tinybundle import make_bundle

    return make_bundle(tmp_path_factory.mktemp("bundles") / "tiny")
