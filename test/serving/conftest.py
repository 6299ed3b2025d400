"""Servers of these tests are forked from one that has imported SGLang."""

import pytest
from harness import server


@pytest.fixture(scope="module", autouse=True)
def fork_servers():
    server.preforked = True
    yield
    server.preforked = False
