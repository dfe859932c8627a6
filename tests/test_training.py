"""The training loop on one process: budgets, every option, exact resuming, and stops that say why."""

import copy
import logging
import shutil

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import refused
from peft import LoraConfig, get_peft_model
from transformers import BertForQuestionAnswering, BertForSequenceClassification

import hf_posswap as posswap
from hf_posswap.training import TrainingConfig, train
from hf_posswap.training.batching import BatchOrder, pad, predicts_next
from hf_posswap.training.budget import SCHEDULES
from hf_posswap.training.skipping import SkippedPositions

RAGGED = [3, 16, 5, 9, 2, 15, 8, 12, 4, 4, 11, 6, 13, 7, 10, 3, 14, 5, 2, 14, 9, 6, 16, 8]


def even_rows(count=24, length=16):
    tokens = torch.randint(2, 98, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trained(model, config, **options):
    return train(model, even_rows(), config, progress=False, **options)


def test_budget_and_learning(make_model):
    """The run reports the tokens it saw, one loss a step, and the loss falls."""
    model, run = trained(make_model("gpt2"), TrainingConfig(max_steps=12, batch_size=8, learning_rate=1e-2))
    assert run.tokens == 12 * 8 * 16 and len(run.losses) == 12 and run.tokens_per_second > 0
    assert run.losses[-1] < 0.8 * run.losses[0]
    assert not model.training and "forward" not in vars(model)
    same = type("Same", (list,), {"__getitems__": lambda rows, places: [rows[0]] * len(places)})(even_rows())
    _, other = train(make_model("gpt2"), same, TrainingConfig(max_steps=1, batch_size=8), progress=False)
    assert other.losses[0] != pytest.approx(run.losses[0])  # rows that a data set reads together, as it transforms them


def test_dropout_can_be_off(make_model):
    """`dropout=False` trains in evaluation mode: another seed of dropout changes nothing."""
    torch_losses = [
        trained(make_model("gpt2", resid_pdrop=0.5), TrainingConfig(max_steps=1, batch_size=24, seed=seed, dropout=drop))[1]
        for seed, drop in ((0, False), (1, False), (0, True), (1, True))
    ]
    first, second, third, fourth = (run.losses[0] for run in torch_losses)
    assert first == pytest.approx(second, rel=1e-5)
    assert abs(third - fourth) > 1e-3


def test_tables_learn_faster(make_model):
    """Adam's first step moves every entry by its learning rate: tables by `table_learning_rate_factor` times as much."""
    for factor in (1.0, 50.0):
        model = posswap.swap(make_model("gpt2"), "relative:clip=4,values=false")
        before = model.transformer.h[0].attn.c_attn.weight.detach().clone()
        config = {"max_steps": 1, "batch_size": 8, "learning_rate": 1e-4, "warmup_ratio": 0}
        budget = TrainingConfig(**config, table_learning_rate_factor=factor)
        trained(model, budget)
        attention = model.transformer.h[0].attn
        assert attention.positions.key_table.abs().max().item() == pytest.approx(1e-4 * factor, rel=1e-2)
        assert (attention.c_attn.weight - before).abs().max().item() == pytest.approx(1e-4, rel=1e-2)


def test_after_step_looks_and_changes_nothing(make_model, monkeypatch):
    """Called once a step with the plain model, its time not counted; evaluation mode does not stay, losses stay the same."""
    config, seen, clock = TrainingConfig(max_steps=3, batch_size=8), [], [0.0]

    def look(model, run):
        clock[0] += 1000
        seen.append((type(model).__name__, model.training, run.tokens, len(run.losses)))
        model.eval()

    _, expected = trained(make_model("gpt2", resid_pdrop=0.1), config)
    monkeypatch.setattr("hf_posswap.training.run_log.time.perf_counter", lambda: clock[0])
    _, run = trained(make_model("gpt2", resid_pdrop=0.1), config, after_step=look)
    assert run.seconds == 0 and seen == [("GPT2LMHeadModel", True, step * 8 * 16, step) for step in (1, 2, 3)]
    assert run.losses == expected.losses


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"checkpoint_every": -1}, "at least 0"),
        ({"warmup_ratio": 10.0}, "a share of the steps, from 0 to 1"),
        ({"max_grad_norm": 0.0}, "clip gradients to nothing"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 0.0}, "above 1e-7"),
        ({"batch_size": 6, "gradient_accumulation_steps": 4}, "does not divide"),
        ({"batch_size": 99}, "do not fill one batch"),
        ({"lr_scheduler_type": "cosin"}, "cosine, linear"),
        ({"train_sampling_strategy": "sorted"}, "group_by_length"),
        ({"mixed_precision": "bfloat16"}, "'bfloat16' is not known; known are no, bf16"),
        ({"mixed_precision": "fp16"}, "'fp16' needs a GPU"),
        ({"torch_compile": "nonsense"}, "inductor"),
        ({"gradient_checkpointing": True, "dropout": False}, "training mode"),
        ({"report_to": "tensorboard"}, "tuple"),
        ({"report_to": ("tensorboard",)}, "needs output"),
    ],
)
def test_bad_budget(make_model, monkeypatch, options, says):
    """A budget that cannot be spent is refused before training."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    refused(says, lambda: trained(make_model("gpt2"), TrainingConfig(**options)))


def ragged_rows(count=24, classes=False):
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": torch.randint(2, 98, (RAGGED[place % 24],), generator=generator)} for place in range(count)]
    for place, row in enumerate(rows):
        if classes:
            row["labels"] = torch.tensor(place % 3)
        else:  # some rows have many labels and some have none
            dropped = torch.rand(row["input_ids"].shape, generator=generator) < (place % 4) / 3
            row["labels"] = row["input_ids"].masked_fill(dropped, -100)
    return rows


def test_order_is_a_new_shuffle_every_epoch():
    """Each epoch holds each example at most once; seed and epoch change the order; a step can be looked up on its own."""
    order = BatchOrder(22, 4, seed=0)
    epochs = [[order[step] for step in range(5 * epoch, 5 * epoch + 5)] for epoch in range(2)]
    for epoch in epochs:
        assert len(set(sum(epoch, []))) == 20
    assert epochs[0] != epochs[1]
    assert BatchOrder(22, 4, seed=0)[7] == epochs[1][2]
    assert BatchOrder(22, 4, seed=5)[0] != epochs[0][0]


def test_rows_of_other_keys():
    """A key that only some rows have would be lost."""
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3], "token_type_ids": [1]}]
    for given in (rows, rows[::-1]):
        refused("token_type_ids.*same keys", pad, given)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # in PEFT
def test_adapters_shift_labels_too(make_model):
    """What PEFT wraps predicts the next token as before."""
    model = get_peft_model(make_model("gpt2"), LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM"))
    assert predicts_next(model) and not predicts_next(make_model("bert"))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_parts_count_by_their_labels(make_swapped, family):
    """Accumulated parts with uneven padding, some without a single label, take the step of the whole batch."""
    config = dict(max_steps=3, batch_size=8, learning_rate=1e-3)
    runs = []
    for parts in (1, 2, 8):
        model = make_swapped(family, "relative:clip=4")
        budget = TrainingConfig(**config, gradient_accumulation_steps=parts)
        runs.append(train(model, ragged_rows(), budget, collate=pad, progress=False)[1])
    whole = runs[0]
    assert whole.tokens == sum(RAGGED)  # three steps of eight: every example once
    for run in runs[1:]:
        assert run.losses == pytest.approx(whole.losses, rel=1e-5) and run.tokens == whole.tokens


def test_loss_is_the_mean_over_labels(make_model):
    """The first loss is that of the model itself on the whole batch; of examples where labels are classes."""
    classes = {"head": BertForSequenceClassification, "num_labels": 3}
    hidden = [{**row, "labels": -100 if place % 2 else row["labels"]} for place, row in enumerate(ragged_rows(classes=True))]
    wide = pad([{"input_ids": row["input_ids"]} for row in ragged_rows()])  # of one length: a softmax over places sees padding
    answers = [
        {"input_ids": ids, "attention_mask": mask, "start_positions": 0, "end_positions": 1}
        for ids, mask in zip(wide["input_ids"], wide["attention_mask"], strict=True)
    ]
    size = max(RAGGED)  # as many labels as the longest part has tokens
    several = {"head": BertForSequenceClassification, "num_labels": size, "problem_type": "multi_label_classification"}
    marked = [{**row, "labels": (torch.arange(size) % len(row["input_ids"]) == 0).float()} for row in ragged_rows()]
    cases = [({}, ragged_rows()), (classes, ragged_rows(classes=True)), (classes, hidden), (several, marked)]
    for head, rows in [*cases, ({"head": BertForQuestionAnswering}, answers)]:
        model = make_model("bert", **head)
        expected = model(**pad(rows)).loss.item()
        budget = TrainingConfig(max_steps=1, batch_size=24, gradient_accumulation_steps=6)
        assert train(model, rows, budget, collate=pad, progress=False)[1].losses == [pytest.approx(expected, rel=1e-5)]


def test_lengths_are_grouped(make_model):
    """`group_by_length` sees the same examples with less padding, in another order."""
    runs, widths = [], []
    for strategy in ("random", "group_by_length"):
        seen = []

        def collate(rows, seen=seen):
            batch = pad(rows)
            seen.append(batch["input_ids"].shape[1])
            return batch

        budget = TrainingConfig(max_steps=6, batch_size=4, train_sampling_strategy=strategy)
        runs.append(train(make_model("bert"), ragged_rows(), budget, collate=collate, progress=False)[1])
        widths.append(seen)
    assert runs[0].tokens == runs[1].tokens == sum(RAGGED) and runs[0].losses != runs[1].losses
    assert sum(widths[1]) < 0.8 * sum(widths[0]) and widths[1][0] == max(RAGGED)


def test_every_option_of_a_budget_counts(make_model):
    """Each schedule, and each of these options, ends in another loss; one step trains, too."""
    base = {"max_steps": 5, "batch_size": 24, "learning_rate": 1e-2, "warmup_ratio": 0.3}
    changes = [{"lr_scheduler_type": name} for name in SCHEDULES if "restarts" not in name]  # one period of it is cosine
    changes += [{"max_grad_norm": 1e-8}, {"weight_decay": 0.9}, {"warmup_ratio": 0.9}, {"seed": 1}, {"learning_rate": 1e-3}]
    losses = {trained(make_model("gpt2"), TrainingConfig(**base | change))[1].losses[-1] for change in changes}
    assert len(losses) == len(changes) > 9
    short = TrainingConfig(max_steps=1, batch_size=24, lr_scheduler_type="polynomial")
    before, (after, _) = make_model("gpt2"), trained(make_model("gpt2"), short)
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)  # a warm-up begins at 0, and would be all of it


def test_gradient_checkpointing_computes_layers_twice(make_swapped):
    """The same losses; each layer runs once more for the backward pass; the model is left as it was."""
    counts, runs = [], []
    for on in (False, True):
        model = make_swapped("gpt2", "relative:clip=4")
        calls = []
        model.transformer.h[0].attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        runs.append(trained(model, TrainingConfig(max_steps=2, batch_size=8, gradient_checkpointing=on))[1])
        counts.append(len(calls))
        assert not model.transformer.h[0].gradient_checkpointing and not model.transformer.wte._forward_hooks
    assert counts == [2, 4] and runs[0].losses == pytest.approx(runs[1].losses, rel=1e-6)
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    trained(model, TrainingConfig(max_steps=1, batch_size=8, gradient_checkpointing=True))
    assert model.transformer.h[0].gradient_checkpointing  # the user had switched it on


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_compiled_training(make_swapped):
    """With a backend that needs no C++ compiler: the same losses, and a model that is not compiled afterwards."""
    losses = []
    for backend in (None, "eager"):
        seen, config = set(), TrainingConfig(max_steps=3, batch_size=8, torch_compile=backend)
        look = {"compute_loss": lambda m, b, seen=seen: seen.add(type(m).__name__) or m(**b).loss}
        model, run = trained(make_swapped("gpt2", "rotary", n_layer=1), config, **look)
        losses.append(run.losses)
        assert seen == {"OptimizedModule" if backend else type(model).__name__}
        assert type(model).__name__ != "OptimizedModule" and posswap.describe(model).swapped
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_mixed_precision_leaves_a_plain_model(make_model):
    """bfloat16 changes the losses a little, not those of the next run, and leaves float32 weights that can be swapped."""
    losses, inside = [], []
    look = {"after_step": lambda model, run: inside.append("forward" in vars(model))}
    AcceleratorState._reset_state()  # what other tests have left
    try:
        for precision in (None, "bf16", None, "no"):
            config = TrainingConfig(max_steps=2, batch_size=8, mixed_precision=precision)
            model, run = trained(make_model("gpt2"), config, **look)
            losses.append(run.losses)
            assert model.dtype == torch.float32 and "forward" not in vars(model)
        AcceleratorState._reset_state()
        Accelerator(mixed_precision="bf16")  # the user's, whose state a run shares
        other = TrainingConfig(max_steps=2, batch_size=8, mixed_precision="no")
        refused("has an Accelerator of 'bf16'", trained, make_model("gpt2"), other)
        shared = trained(make_model("gpt2"), TrainingConfig(max_steps=2, batch_size=8))[1]
    finally:
        AcceleratorState._reset_state()
    assert losses[0] == losses[2] == losses[3] and shared.losses == losses[1]
    assert inside == [False] * 8  # measured without autocast, too
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)
    posswap.swap(model, "rotary")


class _Memory:
    """Stands in for a GPU that holds only so many sequences, and fails after random numbers have been drawn."""

    def __init__(self, most, from_call=0):
        self.most, self.from_call, self.calls = most, from_call, 0

    def __call__(self, model, batch):
        self.calls += 1
        loss = model(**batch).loss
        if len(batch["input_ids"]) > self.most and self.calls > self.from_call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return loss


@pytest.mark.parametrize(("parts", "from_call"), [(1, 0), (2, 3)])  # the fourth call is of a step that has gradients already
def test_batch_size_search(make_model, tmp_path, caplog, parts, from_call):
    """Whenever memory runs out, the run is the one that was started with that accumulation: losses and weights bit for bit."""
    config = dict(max_steps=5, batch_size=12, learning_rate=1e-2, checkpoint_every=1)
    budget = TrainingConfig(**config, gradient_accumulation_steps=parts, auto_find_batch_size=True)
    with caplog.at_level(logging.WARNING, "hf_posswap"):
        model, memory = make_model("gpt2", resid_pdrop=0.2), _Memory(3, from_call)
        found, run = trained(model, budget, compute_loss=memory, output=tmp_path / "found", resume=True)  # of nothing
    told = TrainingConfig(**config, gradient_accumulation_steps=4)
    expected, wanted = trained(make_model("gpt2", resid_pdrop=0.2), told, compute_loss=_Memory(3), output=tmp_path / "told")
    assert run.gradient_accumulation_steps == 4 and "4 gradient_accumulation_steps of 3" in caplog.text
    assert run.losses == wanted.losses and run.tokens == wanted.tokens
    for ours, theirs in zip(found.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    resumed = trained(make_model("gpt2"), budget, compute_loss=_Memory(3), output=tmp_path / "found", resume=True)[1]
    assert resumed.gradient_accumulation_steps == 4 and resumed.losses == run.losses


def test_less_memory_after_a_resume(make_model, tmp_path):
    """Parts of a step are counted anew: a run that goes on where less fits is the one that had room."""
    config = dict(max_steps=5, batch_size=12, learning_rate=1e-2, checkpoint_every=1, checkpoints_kept=5, dropout=False)
    budget = TrainingConfig(**config, gradient_accumulation_steps=2, auto_find_batch_size=True)
    whole, run = trained(make_model("gpt2"), budget, output=tmp_path)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 5
    for later in (tmp_path / "checkpoints").glob("step-0000000[2-5]"):
        shutil.rmtree(later)
    resumed, again = trained(make_model("gpt2"), budget, compute_loss=_Memory(3), output=tmp_path, resume=True)
    assert again.gradient_accumulation_steps == 4 and again.losses == pytest.approx(run.losses, rel=1e-4)
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-3)


def test_batch_size_search_ends(make_model, monkeypatch):
    """A single sequence that does not fit is an error, other errors are not memory, and several processes are refused, as are
    single runs of processes that a launcher has started and that do not know of each other.
    """
    config = TrainingConfig(max_steps=1, batch_size=6, auto_find_batch_size=True)
    refused("single sequence", trained, make_model("gpt2"), config, compute_loss=_Memory(0))

    def wrong(model, batch):
        raise RuntimeError("shapes do not fit")

    refused("shapes", trained, make_model("gpt2"), config, compute_loss=wrong, error=RuntimeError)
    with pytest.raises(torch.OutOfMemoryError):
        trained(make_model("gpt2"), TrainingConfig(max_steps=1, batch_size=6), compute_loss=_Memory(0))
    monkeypatch.setenv("WORLD_SIZE", "2")  # what a launcher leaves behind where there is no GPU
    refused("one process", trained, make_model("gpt2"), config)
    refused("torchrun", trained, make_model("gpt2"), TrainingConfig(max_steps=1, batch_size=8))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")  # the GPU is not used
    refused("needs a GPU", trained, make_model("gpt2"), TrainingConfig(max_steps=1, mixed_precision="fp16"))


def test_trackers(make_model, tmp_path, monkeypatch):
    """tensorboard gets every step; unknown and missing trackers are errors, not silence."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    budget = TrainingConfig(max_steps=4, batch_size=8, report_to=("tensorboard",))
    _, run = trained(make_model("gpt2"), budget, output=tmp_path)
    (events,) = (tmp_path / "training").glob("events*")
    seen = EventAccumulator(str(events)).Reload()
    assert [(event.step, event.value) for event in seen.Scalars("loss")] == [
        (step, pytest.approx(loss, rel=1e-6)) for step, loss in enumerate(run.losses, 1)
    ]
    rates = [event.value for event in seen.Scalars("learning_rate")]  # those that the steps took: one warms up, then a cosine
    assert rates == pytest.approx([0, 3e-4, 2.25e-4, 0.75e-4])
    assert {"gradient_norm", "tokens_per_second"} <= set(seen.Tags()["scalars"])
    refused("not a tracker", trained, make_model("gpt2"), TrainingConfig(report_to=("tensorbord",)), output=tmp_path / "b")
    monkeypatch.setattr("hf_posswap.training.launching.get_available_trackers", lambda: [])
    refused("pip install comet-ml", trained, make_model("gpt2"), TrainingConfig(report_to=("comet_ml",)), output=tmp_path / "b")


def test_nothing_to_train(make_model):
    """A frozen model, labels that are all alike, and a loss that reaches no weight are refused, a hopeless task never is."""
    budget = TrainingConfig(max_steps=12, batch_size=8)
    refused("frozen", trained, make_model("gpt2").requires_grad_(False), budget)
    head = {"head": BertForSequenceClassification, "num_labels": 3}
    rows = ragged_rows(classes=True)
    alike = [{**row, "labels": torch.tensor(2)} for row in rows]
    refused("all labels are 2", train, make_model("bert", **head), alike, budget, collate=pad, progress=False)
    ignored = [{**row, "labels": torch.full_like(row["input_ids"], -100)} for row in rows]
    refused("-100", train, make_model("bert"), ignored, budget, collate=pad, progress=False)
    constant = {"compute_loss": lambda m, b: m(**b).loss * 0 + 1}
    refused("zero since the first step", trained, make_model("gpt2"), budget, **constant)
    unlabelled = [{"input_ids": row["input_ids"]} for row in even_rows()]
    refused("labels", train, make_model("gpt2"), unlabelled, budget, progress=False)
    one_differs = [*alike[1:], rows[0]]
    assert len(train(make_model("bert", **head), one_differs, budget, collate=pad, progress=False)[1].losses) == 12
    # Against itself there is nothing to learn, and no mistake either.
    assert trained(make_model("gpt2"), budget, compute_loss=lambda m, b: m(**b).loss * 0)[1].losses == [0.0] * 12


def test_positions_are_skipped(make_swapped):
    """Skipped positions leave one gap, drawn by the seed, in what stays one text; a target that does not fit is an error."""
    model = make_swapped("gpt2", "rotary", max_positions=200)
    seen = [SkippedPositions(even_rows(), model, 200, seed)[3]["position_ids"] for seed in (0, 0, 1)]
    assert seen[0].equal(seen[1]) and not seen[0].equal(seen[2])
    for positions in seen:
        steps = positions.diff()
        assert positions[0] == 0 and (steps != 1).sum() == 1 and 16 < positions.max() < 200
    rows = SkippedPositions(even_rows(), model, 16, 0)  # no room for a gap
    plain, masked = model(even_rows()[3]["input_ids"][None]).logits, model(**pad([rows[3]])).logits
    torch.testing.assert_close(masked, plain)
    apart = {name: torch.as_tensor(value)[None] for name, value in SkippedPositions(even_rows(), model, 200, 0)[3].items()}
    apart.pop("labels", None)
    far = model(**apart, use_cache=False).logits
    assert (far[:, -1] - plain[:, -1]).abs().max() > 1e-3
    apart["input_ids"] = torch.cat([(apart["input_ids"][:, :1] + 1) % 64, apart["input_ids"][:, 1:]], dim=1)
    assert (model(**apart, use_cache=False).logits[:, -1] - far[:, -1]).abs().max() > 1e-4  # the second part reads the first
    counted = make_swapped("opt", "rotary", max_positions=32)  # whose table has two rows before the first position
    ids = even_rows()[3]["input_ids"][None]
    given = SkippedPositions(even_rows(), counted, 16, 0)[3]["position_ids"][None]
    torch.testing.assert_close(counted(ids, position_ids=given).logits, counted(ids).logits)
    twin = copy.deepcopy(model)
    configs = [TrainingConfig(max_steps=2, batch_size=8, skip_to=to) for to in (None, 200)]
    losses = [trained(m, config)[1].losses for m, config in zip((twin, model), configs, strict=True)]
    assert losses[0] != losses[1]
    for to, message in ((8, "has 16 tokens"), (300, "more than the 200 tokens")):
        refused(message, trained, model, TrainingConfig(max_steps=1, batch_size=8, skip_to=to))
