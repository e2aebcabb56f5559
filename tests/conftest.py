"""For every test."""

import os

import pytest

# Ray starts by itself otherwise, at the first call that needs one, and later tests run in a cluster that nobody ends.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


@pytest.fixture(scope="session", autouse=True)
def packed_weights_go_to_a_folder_of_the_session(tmp_path_factory):
    """Small models that tests write must not fill the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARMROOT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
