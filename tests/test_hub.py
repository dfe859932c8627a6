"""A Hub on loopback and the real client, in a process of their own: the scenarios of hub_job.py."""

import json
import os
import socket
from pathlib import Path

import pytest
from conftest import run_python
from hub import Hub
from hub_job import SCENARIOS


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What all scenarios said."""
    root = tmp_path_factory.mktemp("hub")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        hub = Hub(None, f"http://127.0.0.1:{free.getsockname()[1]}")  # where the job is to run one
    job = Path(__file__).with_name("hub_job.py")
    done = run_python(job, root, env=os.environ | hub.environment(root / "home") | {"TQDM_DISABLE": "1"})
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(outcome, name):
    """The scenario went as it should."""
    assert not outcome[name], outcome[name]
