"""Sharing through the real client with its default settings: the scenarios of share_job.py, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from share_job import SCENARIOS

JOB = Path(__file__).parent / "share_job.py"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What all scenarios said."""
    command = [sys.executable, str(JOB), str(tmp_path_factory.mktemp("share"))]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(outcome, name):
    """The scenario went as it should."""
    assert not outcome[name], outcome[name]
