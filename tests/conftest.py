"""For every test."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def packed_weights_go_to_a_folder_of_the_session(tmp_path_factory):
    """Small models that tests write must not fill the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARMROOT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
