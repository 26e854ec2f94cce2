"""Layers with early exit: what is answered where, who shares a batch, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.extent import HANG_S
from vllm_ext.cellular.cells import CellError
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.models import Layers, ModelError, RequestError
from vllm_ext.cellular.options import EngineOptions

VOCABULARY, WIDTH, CLASSES, DEPTH = 20, 8, 3, 4


class Mix(nn.Module):
    """A layer whose places see each other; the first one embeds tokens."""

    def __init__(self, *, embeds: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if embeds else nn.Identity()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        state = self.embed(state)
        seen: torch.Tensor = self.attend(state, state, state, key_padding_mask=~mask, need_weights=False)[0]
        return state + 2 * seen.tanh()


class Head(nn.Module):
    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, classes)

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear((state * mask[:, :, None]).sum(1))
        return scores


class Meeting(nn.Module):
    """A layer that notes its batches, and can be held."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.notes = inner, False
        self.batches: list[torch.Tensor] = []
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __deepcopy__(self, memo: Any) -> Meeting:
        return Meeting(Mix())

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.notes:
            self.batches.append(state.clone())
            self.reached.set()
            assert self.go_on.wait(HANG_S)
        found: torch.Tensor = self.inner(state, mask)
        return found


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Mix(embeds=number == 0).requires_grad_(False) for number in range(DEPTH)]


def heads(count: int = DEPTH) -> list[nn.Module]:
    torch.manual_seed(1)
    return [Head().requires_grad_(False) for _ in range(count)]


def wrapped(exit: Any = None, given: Sequence[nn.Module] | None = None, **options: Any) -> Layers:
    options = {"vocabulary": VOCABULARY, "lengths": (4, 8), "sure": 0.8} | options
    return Layers.from_modules(modules() if given is None else given, exit or heads(), **options)


def plain(tokens: list[int], sure: float, exits: Sequence[nn.Module | None]) -> tuple[int, torch.Tensor]:
    """Return the depth at which a request leaves, and its scores, without padding, layer by layer."""
    state, mask = torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.bool)
    scores = torch.empty(0)
    for number, (module, exit) in enumerate(zip(modules(), exits, strict=True), 1):
        state = module(state, mask)
        if exit is not None:
            scores = exit(state, mask)[0]
            if scores.softmax(0).max() >= sure:
                return number, scores
    return DEPTH, scores


def requests(count: int = 60, longest: int = 8) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


@pytest.mark.parametrize("exits", [heads(), [None, heads()[1], None, heads()[3]]], ids=["all", "some"])
def test_requests_leave_where_they_do_layer_by_layer_and_with_the_same_answer(exits: list[nn.Module | None]) -> None:
    with CellularEngine(wrapped(exits)) as engine:
        answers = [handle.result(HANG_S) for handle in [engine.submit({"tokens": tokens}) for tokens in requests()]]
        assert not engine.open_requests
    depths = set()
    for tokens, answer in zip(requests(), answers, strict=True):
        depth, scores = plain(tokens, 0.8, exits)
        depths.add(depth)
        assert answer["layers"] == depth
        assert answer["scores"] == pytest.approx(scores.tolist(), abs=1e-5)
        assert answer["label"] == int(scores.argmax())
    assert depths == {number for number, exit in enumerate(exits, 1) if exit is not None}


def test_one_head_may_serve_all_layers_and_a_function_may_decide() -> None:
    head = heads(1)[0]
    with CellularEngine(wrapped(head, sure=lambda scores: scores[:, 0] > 0)) as engine:
        for tokens in requests(20):
            answer = engine.submit({"tokens": tokens}).result(HANG_S)
            assert answer["layers"] == DEPTH or answer["scores"][0] > 0


def test_requests_of_different_age_share_the_batch_of_a_layer() -> None:
    """The first request is held in layer 1 while two others come; it meets them in layer 2."""
    held, seen = Meeting(modules()[1]), Meeting(modules()[2])
    first, *_, last = modules()
    model = wrapped([None, None, None, heads()[3]], [first, held, seen, last], lengths=(4,))
    options = EngineOptions(max_batch=dict.fromkeys((cell.name for cell in model.cells), 2), cells="published")
    sentences = [[1, 2], [3], [4, 5, 6]]
    with CellularEngine(model, options) as engine:
        held.notes = seen.notes = True
        held.go_on.clear()
        handles = [engine.submit({"tokens": sentences[0]})]
        assert held.reached.wait(HANG_S)
        handles += [engine.submit({"tokens": tokens}) for tokens in sentences[1:]]
        held.go_on.set()
        answers = [handle.result(HANG_S) for handle in handles]
    assert [len(batch) for batch in held.batches] == [1, 2]
    assert [len(batch) for batch in seen.batches] == [2, 1]
    state, mask = torch.tensor([sentences[0]]), torch.ones(1, 2, dtype=torch.bool)
    for module in modules()[:2]:
        state = module(state, mask)
    torch.testing.assert_close(seen.batches[0][0, :2], state[0])
    for answer, tokens in zip(answers, sentences, strict=True):
        assert answer["scores"] == pytest.approx(plain(tokens, 1.1, heads())[1].tolist(), abs=1e-5)


def test_layers_after_the_exit_are_not_computed() -> None:
    last = Meeting(modules()[3])
    with CellularEngine(wrapped(sure=1e-6, given=[*modules()[:3], last])) as engine:
        last.notes = True
        assert {engine.submit({"tokens": tokens}).result(HANG_S)["layers"] for tokens in requests(9)} == {1}
    assert not last.batches


def test_requests_are_padded_to_the_next_length_and_later_layers_go_first() -> None:
    model = wrapped(padding=7)
    assert [cell.name for cell in model.cells][::3] == ["layer0_4", "layer3_4", "layer2_8"]
    assert [cell.priority for cell in model.cells] == [0, 1, 2, 3] * 2
    parsed = model.parse({"tokens": [1, 2, 3, 4, 5]})
    assert parsed.data["tokens"].tolist() == [[1, 2, 3, 4, 5, 7, 7, 7]]
    assert parsed.data["mask"].tolist() == [[True] * 5 + [False] * 3]
    assert model.parse({"tokens": [1, 2, 3, 4]}).shape == 4


@pytest.mark.parametrize("tokens", [[], [1] * 9, [VOCABULARY], [-1], "ab", [1.0], None])
def test_tokens_that_the_model_cannot_take_are_refused(tokens: Any) -> None:
    with pytest.raises(RequestError, match=r"tokens=.*must be a list of 1 to 8 token ids from 0 to 19"):
        wrapped().parse({"tokens": tokens})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit": heads(3)}, "exit: 3 heads for 4 modules"),
        ({"exit": [*heads(3), None]}, "exit: 4 heads .* not None for the last"),
        ({"given": [], "exit": heads(1)[0]}, "exit: 0 heads for 0 modules"),
        ({"exit": [*heads(3), Head(5)]}, r"exit: gives a row float32\[3\] or float32\[5\], must be a score per class"),
        ({"exit": nn.Identity()}, r"modules\[0\] or its exit, with 4 tokens: TypeError"),
        ({"given": [Mix(), *modules()[1:]]}, r"modules\[0\] or its exit, with 4 tokens: RuntimeError"),
        ({"lengths": ()}, r"lengths=\[\]: must be whole numbers from 1"),
        ({"lengths": (0, 8)}, r"lengths=\[0, 8\]: must be whole numbers from 1"),
        ({"padding": VOCABULARY}, "padding=20: must be a token id below vocabulary=20"),
        ({"sure": 0}, "sure=0: must be a probability above 0, or a function"),
        ({"sure": "very"}, "sure='very': must be a probability"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_with_a_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        wrapped(**options)


def test_a_function_that_decides_otherwise_than_by_row_is_refused() -> None:
    with pytest.raises(CellError, match="until='sure' of cell layer0_4: must be an output of dtype bool"):
        wrapped(sure=lambda scores: scores)


def test_layers_whose_rows_look_at_each_other_are_refused_at_start() -> None:
    class Leaky(Mix):
        def forward(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(state, mask) - state.mean(0, keepdim=True)

    layers = modules()
    with pytest.raises(CellError, match="output state of cell layer1_4: a row differs by"):
        CellularEngine(wrapped(given=[layers[0], Leaky().requires_grad_(False), *layers[2:]]))
