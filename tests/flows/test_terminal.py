"""What a person sees is never what work depends on."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
CODE = """
import logging
from flows.terminal import set_up_logging
set_up_logging()
for line in range(3):
    logging.getLogger("semix.train").info("epoch %d", line)
print("went on")
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that Linux has")
def test_a_log_on_a_full_disk_ends_no_work():
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", CODE], cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=full
        )
    assert ended.stdout == b"went on\n"
