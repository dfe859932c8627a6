"""A Hub on loopback and the real client: the checks of hub_job.py."""

import socket
from pathlib import Path

from conftest import run_checks
from hub import Hub


def test_sharing_and_reading(tmp_path):
    """All checks pass, with a cache of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        hub = Hub(None, f"http://127.0.0.1:{free.getsockname()[1]}")  # where the checks are to run one
    run_checks(Path(__file__).with_name("hub_job.py"), **hub.environment(tmp_path), TQDM_DISABLE="1")
