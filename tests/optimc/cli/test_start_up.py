import gc

import pytest

from optimc.cli.start_up import start_up


@pytest.fixture(autouse=True)
def _thaw():
    yield
    gc.unfreeze()


def test_garbage_is_not_looked_for_while_loading_nor_later_among_what_was_loaded():
    before = gc.get_freeze_count()
    with start_up():
        assert not gc.isenabled()
        loaded = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(loaded)


def test_a_start_that_fails_leaves_the_collector_running():
    with pytest.raises(ValueError, match="no plan"), start_up():
        raise ValueError("no plan")
    assert gc.isenabled()
