"""Windows over long text, against a naive loop: which window each token is taken from, and what a teacher makes of them."""

import pytest
import torch

from hf_posswap.fitting.teacher import Teacher
from hf_posswap.measure.windows import lay_windows
from hf_posswap.target import find_target

WINDOW, STRIDE = 8, 2


def masks() -> torch.Tensor:
    """Five sequences: whole, padded on either side, shorter than a window, with a hole."""
    mask = torch.ones(5, 21, dtype=torch.bool)
    mask[1, 15:] = False
    mask[2, :4] = False
    mask[3, 5:] = False
    mask[4, 9] = False
    return mask


def starts_of(real: list[bool]) -> list[int]:
    """Where the windows of one sequence start."""
    tokens = [place for place, one in enumerate(real) if one]
    first, end = tokens[0], tokens[-1] + 1
    if end - first > WINDOW:
        return sorted({*range(first, end - WINDOW, STRIDE), end - WINDOW})
    return [min(first, len(real) - WINDOW)]


def naive(mask: torch.Tensor, causal: bool) -> dict[tuple[int, int], list[int]]:
    """The places of the window that each token of each sequence is taken from."""
    found = {}
    for row, real in enumerate(mask.tolist()):
        for token in (place for place, one in enumerate(real) if one):
            holding = [start for start in starts_of(real) if start <= token < start + WINDOW]
            best = holding[0] if causal else min(holding, key=lambda start: abs(token - start - (WINDOW - 1) / 2))
            found[row, token] = list(range(best, best + WINDOW))
    return found


@pytest.mark.parametrize("causal", [True, False])
def test_each_token_from_its_window(causal):
    """Each token is taken once, from the window that a loop finds, and padding never."""
    mask = masks()
    windows, wanted = lay_windows(mask, WINDOW, STRIDE, causal=causal), naive(mask, causal)
    taken = {}
    for row, places, chosen in zip(windows.rows.tolist(), windows.places.tolist(), windows.chosen.tolist(), strict=True):
        for place, one in zip(places, chosen, strict=True):
            if one:
                assert (row, place) not in taken
                taken[row, place] = places
    assert taken == wanted and len(taken) == int(mask.sum())
    apart = [part for few in windows.split(3) for part in few.rows.tolist()]
    assert apart == windows.rows.tolist() and windows.opening().rows.tolist() == [0, 1, 2, 3, 4]
    assert windows.opening().places[:, 0].tolist() == [0, 0, 4, 0, 0]


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_what_a_teacher_says(make_model, family, tmp_path):
    """A teacher's states are those of the original in each token's window; an encoder's are less their mean at each place."""
    model, window = make_model(family), 8
    mask = masks()
    ids = torch.randint(2, 98, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    short = {"input_ids": ids[:2, :6], "attention_mask": mask[:2, :6]}
    batches = [{"input_ids": ids, "attention_mask": mask}, short]
    teacher = Teacher(model, find_target(model)[1], batches, range(2), tmp_path, window)
    found = naive(mask, causal=family == "gpt2")
    with torch.no_grad():
        for index in range(2):
            teacher.advance(range(index, index + 1))
            states, said = {}, teacher.said(0, 0)
            for row, token in found:
                places = found[row, token]
                given = {"input_ids": ids[row, places][None], "attention_mask": mask[row, places][None]}
                out = model.base_model(**given, output_hidden_states=True)
                # GPT-2's last hidden state has gone through its last norm.
                states[row, token] = out.hidden_states[index + 1][0], places
            whole = model.base_model(**short, output_hidden_states=True).hidden_states[index + 1]
            if family == "gpt2" and index == 1:
                said, whole_said = (model.transformer.ln_f(one) for one in (said, teacher.said(0, 1)))
            else:
                whole_said = teacher.said(0, 1)
            real = short["attention_mask"]
            torch.testing.assert_close(whole_said[real], whole[real], rtol=1e-4, atol=1e-5)
            wanted = {key: one[places.index(key[1])] for key, (one, places) in states.items()}
            edges = {(row, int(place)) for row, real in enumerate(mask) for place in real.nonzero()[[0, -1], 0]}
            if family == "bert":
                traces = naive_traces(model, index, ids, mask, edges)
                for key, (_, places) in states.items():
                    if key not in edges:
                        wanted[key] = wanted[key] - traces[places.index(key[1])]
            for (row, token), one in wanted.items():
                torch.testing.assert_close(said[row, token], one, rtol=1e-4, atol=1e-4)
            teacher.move_on()
    assert len(edges) == 10


def naive_traces(model, index, ids, mask, edges) -> torch.Tensor:
    """The mean state at each place of all windows, less the mean over places."""
    at = [[] for _ in range(WINDOW)]
    for row in range(len(ids)):
        for start in starts_of(mask[row].tolist()):
            places = list(range(start, start + WINDOW))
            out = model.base_model(ids[row, places][None], attention_mask=mask[row, places][None], output_hidden_states=True)
            for number, place in enumerate(places):
                if mask[row, place] and (row, place) not in edges:
                    at[number].append(out.hidden_states[index + 1][0, number])
    means = torch.stack([torch.stack(some).mean(0) for some in at])
    return means - means.mean(0)
