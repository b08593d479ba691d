"""Weights and answers on their way between a trainer and an engine; without an engine."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from posttune.engines import weights
from posttune.engines.answers import (
    Answer,
    completions,
    pack_answers,
    pack_prompts,
    unpack_answers,
    unpack_prompts,
)
from posttune.engines.buckets import buckets, folder_tensors, open_bucket
from posttune.engines.facts import Facts
from posttune.engines.frames import Channel, Closed
from posttune.engines.held import held_checksums
from posttune.engines.weights import PIECE, THREADS, Checked, Remembered, digest, needed
from posttune.errors import RunError
from posttune.types import Request

SHAPES = {"a.weight": (4, 3), "b.weight": (5,), "lm_head.weight": (4, 3), "rotary.inv_freq": (2,)}


def tensors() -> list[tuple[str, torch.Tensor]]:
    return [("a.weight", torch.arange(12.0).view(4, 3)), ("b.weight", torch.ones(5, dtype=torch.bfloat16))]


def facts(**fields: Any) -> Facts:
    return Facts((), 1, 1, 1, 32, None, fields.pop("tied", True), SHAPES)


def test_prompts_and_answers_survive_the_way() -> None:
    prompts = [[1, 2, 3], [7], [2**31 - 1]]
    assert unpack_prompts(*pack_prompts(prompts)) == prompts
    answers = [Answer([5, 6], [-0.5, -1.25], "s"), Answer([], [], "l"), Answer([9], [-3.0], "a")]
    assert unpack_answers(*pack_answers(answers)) == answers
    silent = [Answer([5], None, "l")]
    assert unpack_answers(*pack_answers(silent)) == silent
    found = completions([Request("x", (1,), 0)], 3, answers, 4)
    assert [(each.index, each.finish_reason, each.weight_version) for each in found] == [
        (0, "stop", 4),
        (1, "length", 4),
        (2, "abort", 4),
    ]
    with pytest.raises(RuntimeError, match="3 answers for 2 requests x 2"):
        completions([Request("x", (1,), 0)] * 2, 2, answers, 4)


def test_buckets_keep_to_their_limit_and_their_files_go(tmp_path: Path) -> None:
    named = [(f"t{i}", torch.full((256,), float(i))) for i in range(5)] + [("large", torch.zeros(4096))]
    seen, sizes = {}, []
    for bucket in buckets(named, 2048, tmp_path):
        sizes.append(bucket.size)
        assert len(list(tmp_path.iterdir())) == 1, "one at a time"
        seen |= dict(open_bucket(bucket.describe()))
        bucket.free()
        bucket.free()
    assert sizes == [2048, 2048, 1024, 16384]
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(seen[name], tensor) for name, tensor in named)


def test_a_folder_that_is_not_shared_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="shared"):
        list(folder_tensors(tmp_path))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([("a.weigth", torch.ones(4, 3))], "did you mean 'a.weight'"),
        ([("a.weight", torch.ones(3, 4))], r"shape \[3, 4\], the model wants \[4, 3\]"),
        ([*tensors(), ("b.weight", torch.ones(5))], "given twice"),
        (tensors()[:1], r"1 of 2 tensors are missing \(b.weight\)"),
    ],
)
def test_weights_of_another_model_are_refused(given: list[tuple[str, torch.Tensor]], said: str) -> None:
    with pytest.raises(RunError, match=said):
        list(Checked(given, facts(), needed(facts(), None), "engine"))


def test_a_tied_head_may_come_or_not() -> None:
    head = ("lm_head.weight", torch.ones(4, 3))
    for given in (tensors(), [*tensors(), head]):
        passed = [name for name, _ in Checked(given, facts(), needed(facts(), None), "engine")]
        assert passed == ["a.weight", "b.weight"]
    untied = facts(tied=False)
    assert len(list(Checked([*tensors(), head], untied, needed(untied, None), "engine"))) == 3


def test_what_arrived_is_compared_in_the_engines_type() -> None:
    remembered = Remembered(tensors(), "bfloat16", "engine")
    assert [name for name, _ in remembered] == ["a.weight", "b.weight"]
    found = {name: digest(tensor.to(torch.bfloat16)) for name, tensor in tensors()}
    assert remembered.compare(found) == 2
    assert remembered.compare({}) == 0
    with pytest.raises(RunError, match=r"1 of 2 tensors are not in the engine .*\(b.weight\)"):
        remembered.compare(found | {"b.weight": "0"})


def test_more_tensors_are_hashed_than_wait_at_a_time() -> None:
    many = {f"{number}": torch.full((3, number), float(number)) for number in range(4 * THREADS)}
    found = held_checksums(iter(many.items()))
    assert found == {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in many.items()
    }


def test_few_tensors_wait_for_their_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be a copy that is made for the hash alone: all at once would be the model once more."""

    def slow(tensor: torch.Tensor) -> str:
        time.sleep(0.005)
        return digest(tensor)

    monkeypatch.setattr(weights, "digest", slow)
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def copies() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(4 * THREADS + 4):
            tensor = torch.zeros(8)
            made.append(weakref.ref(tensor))
            most = max(most, sum(each() is not None for each in made))
            yield f"{number}", tensor

    assert len(held_checksums(copies())) == len(made)
    assert most <= THREADS + 2


def test_one_element_of_any_stride_is_hashed() -> None:
    for tensor in (torch.tensor([1.5, 2.5])[::2], torch.tensor([1.5]), torch.tensor(1.5)):
        assert digest(tensor) == hashlib.sha256(bytes([0, 0, 0xC0, 0x3F])).hexdigest()
    assert digest(torch.zeros(0)[::2]) == hashlib.sha256(b"").hexdigest()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("size", [0, 1, PIECE // 4, PIECE // 4 + 1, PIECE])
def test_a_tensor_on_a_gpu_hashes_as_on_the_host(size: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0))
    on_gpu = tensor.cuda()
    for one, other in ((tensor, on_gpu), (tensor[::2], on_gpu[::2]), (tensor.bfloat16(), on_gpu.bfloat16())):
        assert digest(other) == digest(one)
    assert digest(on_gpu.sum()) == digest(on_gpu.sum().cpu())


def test_frames_carry_json_and_bytes() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    block = os.urandom(3 << 20)
    sender = threading.Thread(target=ours.send, args=({"x": [1, "é"]}, block))
    sender.start()
    assert theirs.receive() == ({"x": [1, "é"]}, block)
    sender.join()
    with pytest.raises(TimeoutError):
        theirs.receive(0.05)
    ours.close()
    ours.close()
    for call in (theirs.receive, lambda: [theirs.send({}, block) for _ in range(2)]):
        with pytest.raises(Closed):
            call()
