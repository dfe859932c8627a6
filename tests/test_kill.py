"""Training that is killed with -9 at random moments, again and again, ends like training that was left alone."""

import json
import os
from pathlib import Path

from conftest import run_python

JOB = '''
import gc, json, os, random, signal, sys, time
from pathlib import Path
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from hf_posswap.training import TrainingConfig, train

gc.freeze()  # see conftest.py
torch.set_num_threads(1)
folder, every, steps = Path(sys.argv[1]), 2, 20

def job(output, resume, note):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=32, initializer_range=0.3))
    tokens = torch.randint(2, 98, (26, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    config = TrainingConfig(max_steps=steps, batch_size=8, learning_rate=1e-2, checkpoint_every=every)
    model, run = train(model, rows, config, output=output, resume=resume, after_step=note, progress=False)
    weights = {name: tensor.double().sum().item() for name, tensor in model.state_dict().items()}
    (output / "end.json").write_text(json.dumps([run.losses, run.tokens, weights]))

def fork(output, resume=False):
    """Start a run in a copy of this process, which has never trained; return its id and a pipe with a byte for each step."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    try:
        job(output, resume, lambda model, run: os.write(write, b"."))
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)

def newest(output):
    folders = sorted((output / "checkpoints").glob("step-*"))
    for folder in folders:  # whole, every one of them
        json.loads((folder / "progress.json").read_text())
        assert {"model.safetensors", "optimizer.bin", "scheduler.bin"} <= {path.name for path in folder.iterdir()}
    return int(folders[-1].name[5:]) if folders else 0

child, _ = fork(folder / "whole")
assert os.waitpid(child, 0)[1] == 0
draw, lost = random.Random(0), []
for _ in range(5):
    begun = newest(folder / "cut")
    child, steps_taken = fork(folder / "cut", resume=begun > 0)
    seen = sum(len(os.read(steps_taken, 1)) for _ in range(draw.randint(1, 3)))
    time.sleep(draw.uniform(0, 0.06))  # in a step, in a save, in a removal
    os.kill(child, signal.SIGKILL)
    killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    while more := len(os.read(steps_taken, 1000)):
        seen += more
    lost.append(begun + seen - newest(folder / "cut"))
    if not killed:
        break
child, _ = fork(folder / "cut", resume=newest(folder / "cut") > 0)
assert os.waitpid(child, 0)[1] == 0
left = [path.name for path in (folder / "cut" / "checkpoints").iterdir()]
(folder / "seen.json").write_text(json.dumps({"lost": lost, "every": every, "left": sorted(left)}))
'''


def test_kill_9(tmp_path):
    """No more than the steps since the last checkpoint are lost, none is ever broken, and the end is the same bit for bit."""
    (tmp_path / "job.py").write_text(JOB)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    run_python(tmp_path / "job.py", tmp_path, env=environment)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert len(seen["lost"]) >= 3 and max(seen["lost"]) <= seen["every"] and any(seen["lost"])
    assert seen["left"] == ["step-00000018", "step-00000020"]
    whole, cut = (json.loads((tmp_path / name / "end.json").read_text()) for name in ("whole", "cut"))
    assert cut == whole and len(cut[0]) == 20
