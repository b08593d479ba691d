"""What the stage leaves: a folder of transformers, a reward, a critic's beginning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import preference_toy as toy
import pytest
import torch
from posttune.checkpoint._export import export_model
from posttune.checkpoint.sources import open_source
from posttune.cli.main import main
from posttune.config.models import ModelConfig, PluginRef
from posttune.data.conversion import ConvertRequest, convert
from posttune.data.dataset import SampleDataset
from posttune.errors import DataError, ModelError, UserError
from posttune.facade import build_rewards
from posttune.models.load import load_model
from posttune.models.load_scalar import load_critic
from posttune.models.tokenizer import byte_tokenizer, load_tokenizer
from posttune.testing.tiny import tiny_model
from posttune.types import Sample
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    pipeline,
)

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def samples(rows: list[dict[str, Any]], role: str = "chosen") -> list[Sample]:
    return [Sample(str(n), n, row["prompt"], row[role]) for n, row in enumerate(rows)]


def scores(folder: Path, given: list[Sample], **options: Any) -> list[float]:
    ref = PluginRef(name="model", options={"path": str(folder), **options})
    (found,) = build_rewards([ref]).score(given).values()
    assert all(isinstance(score, float) for score in found)
    return found  # type: ignore[return-value]


def one_by_one(model: Any, sequences: list[list[int]]) -> list[float]:
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in sequences]


@pytest.mark.slow
def test_transformers_loads_it_and_the_reward_agrees(trained: Path, task: Path) -> None:
    folder = trained / "models" / "judge"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.num_labels == 1
    dataset = SampleDataset(task / "data")
    rows = [dataset[index] for index in range(50)]
    for role, column in (("chosen", "input_ids"), ("rejected", "rejected_ids")):
        expected = one_by_one(model, [row[column] for row in rows])
        for options in ({}, {"batch_size": 3}, {"batch_size": 1}):
            found = scores(folder, samples(rows, role), **options)
            assert found == pytest.approx(expected, abs=1e-4)
    better = scores(folder, samples(rows)), scores(folder, samples(rows, "rejected"))
    assert sum(a > b for a, b in zip(*better, strict=True)) >= 48
    half = scores(folder, samples(rows), dtype="bfloat16")
    assert half == pytest.approx(scores(folder, samples(rows)), rel=0.1, abs=0.5)


@pytest.mark.slow
def test_transformers_scores_padded_batches_as_we_do(trained: Path, task: Path) -> None:
    folder = trained / "models" / "judge"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    rows = toy.pairs(9, seed=5)
    texts = [row["prompt"] + row["chosen"] + "<eos>" for row in rows]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert (batch["attention_mask"] == 0).any()
    with torch.no_grad():
        found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    assert found.tolist() == pytest.approx(scores(folder, samples(rows)), abs=1e-4)
    piped = pipeline("text-classification", model=str(folder))(texts[0])
    assert piped[0]["label"] == "reward"
    assert piped[0]["score"] == pytest.approx(float(found[0]), abs=1e-4)


@pytest.mark.slow
def test_a_critic_and_a_second_stage_begin_from_it(trained: Path, task: Path, tmp_path: Path) -> None:
    folder = trained / "models" / "judge"
    places = [folder, trained / "checkpoints" / "global_step_60", trained]
    heads = [
        load_critic(ModelConfig(), place, seed=place_seed).model.score.weight
        for place_seed, place in enumerate(places)
    ]
    assert torch.equal(heads[0], heads[1])
    assert torch.equal(heads[0], heads[2])
    assert heads[0].abs().max() > 0
    result = toy.run_stage(tmp_path / "more", toy.stage(task, model=str(folder), steps=1))
    first = toy.metrics(tmp_path / "more")[0]
    assert first["accuracy"] > 0.9
    assert result.output is not None


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_its_checkpoint_exports_the_same(task: Path, tmp_path: Path, lora: Any) -> None:
    model = {"path": str(task / "model"), "lora": lora}
    toy.run_stage(tmp_path / "run", toy.stage(task, model=model, steps=2, optimizer={"lr": 1e-2}))
    checkpoint = open_source(tmp_path / "run" / "checkpoints" / "global_step_2")
    exported = export_model(checkpoint, tmp_path / "out")
    assert exported.verification.passed
    rows = toy.pairs(5)
    left = scores(tmp_path / "run" / "models" / "judge", samples(rows))
    assert scores(tmp_path / "out", samples(rows)) == pytest.approx(left, abs=1e-5)
    assert scores(tmp_path / "run", samples(rows)) == pytest.approx(left, abs=1e-5)
    assert "text-classification" in (tmp_path / "out" / "README.md").read_text()


def test_it_is_no_language_model(task: Path, tmp_path: Path) -> None:
    result = toy.run_stage(tmp_path / "run", toy.stage(task, steps=1))
    assert result.output is not None
    with pytest.raises(ModelError, match="is a sequence classifier, as reward models are"):
        load_model(ModelConfig(), result.output, seed=0)


def with_end_as_padding(folder: Path, **special: str) -> Path:
    """A model whose tokenizer pads with the end of a sequence, as many do."""
    tiny_model(folder, hidden=32, layers=1, heads=1)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<eos>"
    for name, token in special.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 2}))
    return folder


@pytest.mark.parametrize("others", [True, False])
def test_padding_is_never_the_end_of_a_sequence(task: Path, tmp_path: Path, others: bool) -> None:
    """transformers scores the last token that is no padding, and would look one too early."""
    model = with_end_as_padding(tmp_path / "model")
    if not others:
        tokenizer = GPT_STYLE()
        tokenizer.save_pretrained(model)
    rows = toy.pairs(20)
    source = toy.write(rows, tmp_path / "rows.jsonl")
    convert(ConvertRequest([source], tmp_path / "data", tokenizer=model))
    fields = toy.stage(task, model=str(model), data=str(tmp_path / "data"), steps=1)
    folder = toy.run_stage(tmp_path / "run", fields).output
    assert folder is not None
    made = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    assert made.config.pad_token_id != tokenizer.eos_token_id
    dataset = SampleDataset(tmp_path / "data")
    ids = [dataset[index]["input_ids"] for index in range(4)]
    found = scores(folder, samples(rows)[:4])
    assert one_by_one(made, ids) == pytest.approx(found, abs=1e-5)
    if others:
        assert tokenizer.pad_token_id == made.config.pad_token_id
        batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        logits = made(**batch).logits[:, 0].tolist()
        assert logits == pytest.approx(found, abs=1e-5)
    else:
        with pytest.raises(ValueError, match="no padding token is defined"):
            made(input_ids=torch.ones(2, 3, dtype=torch.int64))


def GPT_STYLE() -> Any:
    """One special token, for everything."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = byte_tokenizer().get_vocab()
    vocabulary = {text: number for text, number in letters.items() if number > 2} | {
        "<end>": 2,
        "!!": 0,
        "??": 1,
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<end>", bos_token="<end>", eos_token="<end>", unk_token="<end>"
    )


def test_answers_are_joined_by_the_template_of_the_training(task: Path, tmp_path: Path) -> None:
    """A template from a file goes along with the model; conversations reach it whole."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    rows = [
        {
            "prompt": [*turns, {"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]}],
        }
        for row in toy.pairs(12)
    ]
    request = ConvertRequest(
        [toy.write(rows, tmp_path / "rows.jsonl")],
        tmp_path / "data",
        tokenizer=task / "model",
        template=str(tmp_path / "chat.jinja"),
    )
    convert(request)
    folder = toy.run_stage(tmp_path / "run", toy.stage(task, data=str(tmp_path / "data"), steps=1)).output
    assert folder is not None
    assert load_tokenizer(folder).chat_template == TEMPLATE
    dataset = SampleDataset(tmp_path / "data")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    expected = one_by_one(model, [dataset[index]["input_ids"] for index in range(5)])
    given = [
        Sample(
            str(n),
            n,
            dataset[n]["prompt"],
            dataset[n]["chosen"],
            columns={"messages": dataset[n]["messages"]},
        )
        for n in range(5)
    ]
    assert scores(folder, given) == pytest.approx(expected, abs=1e-5)
    answered = [
        Sample(
            s.id,
            s.group,
            s.prompt,
            s.response,
            columns={"messages": [*s.columns["messages"], {"role": "assistant", "content": "other"}]},
        )
        for s in given
    ]
    assert scores(folder, answered) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(DataError, match="messages need a chat template"):
        scores(folder, given, template="none")


def test_transcripts_in_the_style_of_hh_rlhf(task: Path, tmp_path: Path) -> None:
    rows = [
        {
            "chosen": f"\n\nHuman: {row['prompt']}\n\nAssistant: {row['chosen']}",
            "rejected": f"\n\nHuman: {row['prompt']}\n\nAssistant: {row['rejected']}",
        }
        for row in toy.pairs(12)
    ]
    source = toy.write(rows, tmp_path / "rows.jsonl")
    convert(ConvertRequest([source], tmp_path / "data", tokenizer=task / "model"))
    result = toy.run_stage(tmp_path / "run", toy.stage(task, data=str(tmp_path / "data"), steps=2))
    assert result.output is not None
    dataset = SampleDataset(tmp_path / "data")
    model = AutoModelForSequenceClassification.from_pretrained(result.output)
    given = [dataset[index] for index in range(5)]
    expected = one_by_one(model, [row["input_ids"] for row in given])
    assert scores(result.output, samples(given)) == pytest.approx(expected, abs=1e-5)


def test_long_answers_lose_their_beginning(task: Path, tmp_path: Path) -> None:
    folder = toy.run_stage(tmp_path / "run", toy.stage(task, steps=1)).output
    assert folder is not None
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    ids = [*tokenizer("a" * 90 + "sort: xyz", add_special_tokens=False)["input_ids"], 2]
    given = [Sample("0", 0, "a" * 90 + "sort: ", "xyz")]
    assert scores(folder, given, max_length=20) == pytest.approx(one_by_one(model, [ids[-20:]]), abs=1e-5)
    assert scores(folder, given) == pytest.approx(one_by_one(model, [ids]), abs=1e-5)


def test_an_empty_answer_has_a_score(task: Path, tmp_path: Path) -> None:
    folder = toy.run_stage(tmp_path / "run", toy.stage(task, steps=1)).output
    assert folder is not None
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    given = [Sample("0", 0, "", "a"), Sample("1", 1, "a", "")]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert scores(folder, given) == pytest.approx(one_by_one(model, [[3 + ord("a"), 2]] * 2), abs=1e-5)
    assert len(scores(folder, given, template=str(tmp_path / "chat.jinja"))) == 2
    with pytest.raises(DataError, match="sample 0 cannot be tokenised"):
        scores(folder, [Sample("0", 0, "", "")])


def test_a_model_of_somebody_else_without_padding(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=259, n_embd=16, n_layer=1, n_head=1, num_labels=1, pad_token_id=None)
    torch.manual_seed(0)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    rows = toy.pairs(6)
    ids = [[*tokenizer(row["prompt"] + row["chosen"])["input_ids"], 2] for row in rows]
    assert scores(tmp_path, samples(rows)) == pytest.approx(one_by_one(model, ids), abs=1e-5)


def test_an_encoder_reads_two_texts(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz:"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=16,
        num_labels=1,
        max_position_embeddings=64,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    rows = toy.pairs(5)
    with torch.no_grad():
        expected = [
            float(model(**tokenizer(row["prompt"], row["chosen"], return_tensors="pt")).logits)
            for row in rows
        ]
    assert scores(tmp_path, samples(rows)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("nowhere", ModelError, "no such folder"),
        ("language model", ModelError, "is no sequence-classification model"),
        ("labels", ModelError, r"it has 3 labels \(LABEL_0, LABEL_1, LABEL_2\); a reward model has one"),
        ("tokenizer", ModelError, "the folder holds no tokenizer"),
        ("device", UserError, "reward 'model': device 'gpu' is not one that torch knows"),
    ],
)
def test_what_cannot_serve_is_refused_before_weights_are_read(
    task: Path, tmp_path: Path, case: str, error: type[Exception], message: str
) -> None:
    folder = tmp_path / "model"
    options = {"path": str(folder), "device": "gpu" if case == "device" else "cpu"}
    if case == "language model":
        shutil.copytree(task / "model", folder)
    elif case != "nowhere":
        labels = 3 if case == "labels" else 1
        config = GPT2Config(vocab_size=259, n_embd=16, n_layer=1, n_head=1, num_labels=labels)
        GPT2ForSequenceClassification(config).save_pretrained(folder)
    if case == "labels":
        byte_tokenizer().save_pretrained(folder)
    with pytest.raises(error, match=message) as caught:
        build_rewards([PluginRef(name="model", options=options)])
    if case != "nowhere":
        assert "reward 'model'" in str(caught.value)


def test_broken_weights_are_an_error_not_a_score(task: Path, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=259, n_embd=16, n_layer=1, n_head=1, num_labels=1)
    model = GPT2ForSequenceClassification(config)
    model.score.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="the score of sample 0 is nan"):
        scores(tmp_path, [Sample("0", 0, "a", "b")])


def test_score_on_the_command_line(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = toy.run_stage(tmp_path / "run", toy.stage(task, steps=1)).output
    reward = "model:" + json.dumps({"path": str(folder)})
    arguments = ["score", "--reward", reward, "--input", str(task / "rows.jsonl"), "--response-key", "chosen"]
    code = main([*arguments, "--json"])
    assert code == 0
    found = json.loads(capsys.readouterr().out)["rewards"]["model"]
    assert found["scored"] == 300
    assert found["unscorable"] == found["errors"] == 0
