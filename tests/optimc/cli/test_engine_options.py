import os
from pathlib import Path

import pytest

from optimc.cli.engine_options import load_engine
from optimc.errors import ConfigError


def test_more_threads_than_cores_are_refused_before_the_plan_is_read():
    with pytest.raises(ConfigError, match=r"--threads: \d+ exceeds this machine's \d+ cores"):
        load_engine(Path("absent.plan"), threads=(os.cpu_count() or 1) + 1)
