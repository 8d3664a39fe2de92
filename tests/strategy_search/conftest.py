"""Searches compile hundreds of programs by passes that the tests of passes verify: they are not verified again."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def unverified() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTIR_VERIFY", "0")
        yield
