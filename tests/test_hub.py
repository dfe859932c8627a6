"""A Hub on loopback and the real client: the checks of hub_job.py."""

import socket
from pathlib import Path

from conftest import run_checks


def test_sharing_and_reading(tmp_path):
    """All checks pass, in a process with a cache of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"  # where the checks are to run a Hub
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_tester", "HF_HUB_OFFLINE": "0"}
    job = Path(__file__).with_name("hub_job.py")
    run_checks(job, **settings, HF_HUB_DISABLE_TELEMETRY="1", TQDM_DISABLE="1")
