"""Sharing through the real client, default settings (Xet) and LFS: the scenarios of share_job.py, in a process for each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from share_job import SCENARIOS

JOB = Path(__file__).parent / "share_job.py"


@pytest.fixture(scope="module", params=("xet", "lfs"))
def outcome(request, tmp_path_factory):
    """What all scenarios said, for one kind of storage."""
    command = [sys.executable, str(JOB), request.param, str(tmp_path_factory.mktemp("share"))]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(outcome, name):
    """The scenario went as it should."""
    assert not outcome[name], outcome[name]
