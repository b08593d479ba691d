from __future__ import annotations

from typing import Any

import pytest
from data_tokenizers import CHATML, FORGETFUL, LLAMA, PLAIN, chatml, llama, spaced
from hypothesis import given, settings
from hypothesis import strategies as st
from posttune.data.encoded import Encoded, Truncation, truncate
from posttune.data.records import RowError
from posttune.data.templates import Template, resolve_template
from posttune.data.tokenize import encode_record, tokenizer_fingerprint
from posttune.errors import DataError, ModelError
from posttune.models.tokenizer import byte_tokenizer, load_tokenizer, save_tokenizer
from transformers import PreTrainedTokenizerFast

BYTES = byte_tokenizer()
NONE = Template("none", None)
Text = st.text(min_size=1, max_size=40)

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3+3?"},
    {"role": "assistant", "content": "It is 6,\nI think."},
]


def own(tokenizer: PreTrainedTokenizerFast) -> Template:
    return resolve_template("auto", tokenizer)


def trained(tokenizer: PreTrainedTokenizerFast, encoded: Encoded) -> list[str]:
    """The text of each run of trained tokens."""
    runs: list[list[int]] = []
    before = False
    for token, mask in zip(encoded.input_ids, encoded.loss_mask, strict=True):
        if mask and not before:
            runs.append([])
        if mask:
            runs[-1].append(token)
        before = mask
    return [str(tokenizer.decode(run)) for run in runs]


def check_shape(tokenizer: PreTrainedTokenizerFast, encoded: Encoded) -> None:
    assert len(encoded.input_ids) == len(encoded.loss_mask)
    assert encoded.input_ids[: len(encoded.prompt_ids)] == encoded.prompt_ids
    if tokenizer.bos_token_id is not None:
        assert encoded.input_ids.count(tokenizer.bos_token_id) <= 1


class TestPromptResponse:
    @pytest.mark.parametrize("make", [byte_tokenizer, chatml, llama, spaced])
    def test_loss_covers_response_and_eos_exactly(self, make: Any) -> None:
        tokenizer = make()
        encoded = encode_record({"prompt": "What is 1+1?", "response": "It is 2."}, tokenizer, NONE)
        check_shape(tokenizer, encoded)
        assert trained(tokenizer, encoded) == [f"It is 2.{tokenizer.eos_token}"]
        assert encoded.input_ids[-1] == tokenizer.eos_token_id
        assert not any(encoded.loss_mask[: len(encoded.prompt_ids)])
        assert all(encoded.loss_mask[len(encoded.prompt_ids) :])
        assert tokenizer.decode(encoded.prompt_ids, skip_special_tokens=True) == "What is 1+1?"

    def test_bos_where_the_tokenizer_adds_one_and_never_two(self) -> None:
        tokenizer = llama()
        for prompt in ("Hi", "<s>Hi"):
            encoded = encode_record({"prompt": prompt, "response": "Yes"}, tokenizer, NONE)
            assert encoded.input_ids.count(tokenizer.bos_token_id) == 1
            assert encoded.prompt_ids[0] == tokenizer.bos_token_id

    def test_an_eos_that_is_there_is_not_doubled(self) -> None:
        tokenizer = llama()
        encoded = encode_record({"prompt": "Hi", "response": "Yes</s>"}, tokenizer, NONE)
        assert encoded.input_ids.count(tokenizer.eos_token_id) == 1

    def test_prompt_only(self) -> None:
        encoded = encode_record({"prompt": "Hi"}, BYTES, NONE)
        assert encoded.prompt_ids == encoded.input_ids
        assert not any(encoded.loss_mask)

    @settings(deadline=None)
    @given(prompt=Text, response=Text)
    def test_bytes_round_trip(self, prompt: str, response: str) -> None:
        encoded = encode_record({"prompt": prompt, "response": response}, BYTES, NONE)
        assert BYTES.decode(encoded.prompt_ids) == prompt
        assert trained(BYTES, encoded) == [response + "<eos>"]

    @settings(deadline=None)
    @given(prompt=Text, response=Text)
    def test_parts_of_a_spaced_tokenizer_make_the_whole(self, prompt: str, response: str) -> None:
        tokenizer = spaced()
        encoded = encode_record({"prompt": prompt, "response": response}, tokenizer, NONE)
        check_shape(tokenizer, encoded)
        whole = tokenizer(prompt + response, add_special_tokens=False)["input_ids"]
        assert encoded.input_ids == [tokenizer.bos_token_id, *whole, tokenizer.eos_token_id]

    def test_text_only(self) -> None:
        encoded = encode_record({"text": "abc"}, BYTES, NONE)
        assert encoded.loss_mask == [False, True, True, True]
        assert llama().decode(encode_record({"text": "abc"}, llama(), NONE).input_ids) == "<s>abc</s>"

    def test_preference(self) -> None:
        encoded = encode_record({"prompt": "p", "chosen": "good", "rejected": "bad"}, BYTES, NONE)
        assert trained(BYTES, encoded) == ["good<eos>"]
        assert BYTES.decode(encoded.rejected_ids or []) == "pbad<eos>"


class TestChat:
    def test_single_turn_through_the_template(self) -> None:
        tokenizer = chatml()
        encoded = encode_record({"prompt": "Hi", "response": "Yes."}, tokenizer, own(tokenizer))
        expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
        assert tokenizer.decode(encoded.input_ids) == expected  # nothing after the EOS
        assert trained(tokenizer, encoded) == ["Yes.<|im_end|>"]

    @pytest.mark.parametrize(
        ("tokenizer", "ends"),
        [
            (chatml(), ["<|im_end|>", "<|im_end|>"]),
            # The turn's end is not what this model stops at: its EOS follows, or it would never stop.
            (chatml(eos="<|endoftext|>"), ["<|im_end|>", "<|im_end|><|endoftext|>"]),
            (llama(LLAMA), ["</s>", "</s>"]),
            (llama(PLAIN), ["", "</s>"]),
        ],
    )
    def test_every_assistant_turn_and_nothing_else(
        self, tokenizer: PreTrainedTokenizerFast, ends: list[str]
    ) -> None:
        encoded = encode_record({"messages": CHAT}, tokenizer, own(tokenizer))
        check_shape(tokenizer, encoded)
        assert trained(tokenizer, encoded) == [f"4{ends[0]}", f"It is 6,\nI think.{ends[1]}"]
        assert encoded.input_ids[-1] == tokenizer.eos_token_id

    @pytest.mark.parametrize("tokenizer", [chatml(), llama(LLAMA), llama(PLAIN)])
    def test_prompt_ids_are_what_a_rollout_gets(self, tokenizer: PreTrainedTokenizerFast) -> None:
        encoded = encode_record({"messages": CHAT}, tokenizer, own(tokenizer))
        text = tokenizer.apply_chat_template(CHAT[:-1], add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(encoded.prompt_ids) == text
        alone = encode_record({"messages": CHAT[:-1]}, tokenizer, own(tokenizer))
        assert alone.input_ids == encoded.prompt_ids

    def test_a_template_that_rewrites_history_trains_the_last_turn(self) -> None:
        tokenizer = chatml(template=FORGETFUL)
        thought = [dict(m) for m in CHAT]
        thought[2]["content"] = "<think>two twos</think>4"
        thought[4]["content"] = "<think>two threes</think>6"
        encoded = encode_record({"messages": thought}, tokenizer, own(tokenizer))
        assert trained(tokenizer, encoded) == ["<think>two threes</think>6<|im_end|>"]
        assert "two twos" not in tokenizer.decode(encoded.input_ids)

    def test_weights(self) -> None:
        tokenizer = chatml()
        weighted: list[dict[str, Any]] = [dict(m) for m in CHAT]
        weighted[2]["weight"] = 0
        encoded = encode_record({"messages": weighted}, tokenizer, own(tokenizer))
        assert trained(tokenizer, encoded) == ["It is 6,\nI think.<|im_end|>"]
        weighted[4]["loss_weight"] = 0.0
        with pytest.raises(RowError, match="weight 0"):
            encode_record({"messages": weighted}, tokenizer, own(tokenizer))

    def test_tools_and_calls_reach_the_template(self) -> None:
        template = (
            "{% if tools %}tools: {{ tools[0].function.name }}\n{% endif %}"
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
            "{% for c in m.tool_calls or [] %}"
            "<call>{{ c.function.name }} {{ c.function.arguments.city }}</call>{% endfor %}"
            "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        tokenizer = chatml(template=template)
        call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        messages = [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "21"},
            {"role": "assistant", "content": "21 °C"},
        ]
        tools = '[{"type": "function", "function": {"name": "weather"}}]'
        encoded = encode_record({"messages": messages, "tools": tools}, tokenizer, own(tokenizer))
        assert trained(tokenizer, encoded) == ["<call>weather Paris</call><|im_end|>", "21 °C<|im_end|>"]
        text = str(tokenizer.decode(encoded.input_ids))
        assert text.startswith("tools: weather")
        assert "None" not in text

    def test_a_template_that_drops_calls_is_refused(self) -> None:
        call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        with pytest.raises(RowError, match="does not show the call of tool 'weather'"):
            encode_record({"messages": messages}, chatml(), own(chatml()))

    def test_a_refusing_template_is_a_bad_row(self) -> None:
        tokenizer = chatml(template="{{ raise_exception('roles must alternate') }}")
        with pytest.raises(RowError, match="roles must alternate"):
            encode_record({"prompt": "a", "response": "b"}, tokenizer, own(tokenizer))

    def test_messages_without_a_template(self) -> None:
        with pytest.raises(DataError, match="need a chat template"):
            encode_record({"messages": CHAT}, BYTES, NONE)

    @settings(deadline=None)
    @given(texts=st.lists(Text.filter(str.strip), min_size=1, max_size=4))
    def test_any_texts(self, texts: list[str]) -> None:
        tokenizer = chatml()
        messages = []
        for text in texts:
            messages += [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
        encoded = encode_record({"messages": messages}, tokenizer, own(tokenizer))
        assert trained(tokenizer, encoded) == [text + "<|im_end|>" for text in texts]


class TestTruncation:
    @settings(deadline=None)
    @given(
        prompt=st.integers(0, 12),
        response=st.integers(1, 12),
        limit=st.integers(1, 26),
        side=st.sampled_from(["left", "right", "middle"]),
        bos=st.booleans(),
    )
    def test_mask_and_prompt_follow(
        self, prompt: int, response: int, limit: int, side: Truncation, bos: bool
    ) -> None:
        ids = list(range(100, 100 + prompt + response))
        mask = [place >= max(prompt, 1) for place in range(len(ids))]
        whole = Encoded(ids[:prompt], ids, mask)
        if not any(mask):
            return
        start = 100 if bos else None
        try:
            cut = truncate(whole, limit, side, start)
        except RowError:
            with pytest.raises(RowError, match="no response is left"):
                truncate(whole, limit, side, start)
            return
        assert len(cut.input_ids) == min(limit, len(ids))
        assert cut.input_ids[: len(cut.prompt_ids)] == cut.prompt_ids
        assert set(cut.prompt_ids) == set(cut.input_ids) & set(ids[:prompt])
        old = dict(zip(ids, mask, strict=True))
        assert cut.loss_mask[0] is False
        assert cut.loss_mask[1:] == [old[token] for token in cut.input_ids[1:]]
        assert cut.input_ids == sorted(cut.input_ids)
        assert any(cut.loss_mask)
        assert cut.cut == len(ids) - len(cut.input_ids)

    def test_sides(self) -> None:
        whole = Encoded([1, 2, 3], [1, 2, 3, 4, 5, 6], [False] * 3 + [True] * 3)
        assert truncate(whole, 4, "right").input_ids == [1, 2, 3, 4]
        assert truncate(whole, 4, "left").input_ids == [3, 4, 5, 6]
        assert truncate(whole, 4, "left", bos=1).input_ids == [1, 4, 5, 6]
        assert truncate(whole, 4, "middle").input_ids == [1, 2, 5, 6]
        assert truncate(whole, 6, "refuse") is whole
        with pytest.raises(RowError, match="6 tokens, more than the limit of 5"):
            truncate(whole, 5, "refuse")

    def test_both_answers_keep_one_prompt(self) -> None:
        ids = [1, 2, 3, 4, 5, 6]
        whole = Encoded(ids[:4], ids, [False] * 4 + [True] * 2, rejected_ids=[1, 2, 3, 4, 7, 8, 9])
        left = truncate(whole, 6, "left")
        assert (left.prompt_ids, left.input_ids) == ([2, 3, 4], [2, 3, 4, 5, 6])
        assert left.rejected_ids == [2, 3, 4, 7, 8, 9]
        assert left.loss_mask == [False] * 3 + [True] * 2
        assert truncate(whole, 6, "left", bos=1).prompt_ids == [1, 3, 4]
        assert truncate(whole, 5, "middle").rejected_ids == [1, 4, 7, 8, 9]
        short = truncate(whole, 4, "left")  # the prompt keeps half, the answers lose their ends
        assert (short.input_ids, short.rejected_ids) == ([3, 4, 5, 6], [3, 4, 7, 8])
        assert truncate(whole, 5, "right").rejected_ids == [1, 2, 3, 4, 7]


class TestTokenizers:
    def test_no_eos_is_refused(self) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.eos_token = None
        with pytest.raises(ModelError, match="end-of-sequence"):
            encode_record({"prompt": "a"}, tokenizer, NONE)

    @pytest.mark.parametrize("make", [byte_tokenizer, chatml, llama, spaced])
    def test_fingerprint_survives_saving_and_use(self, make: Any, tmp_path: Any) -> None:
        tokenizer = make()
        before = tokenizer_fingerprint(tokenizer)
        save_tokenizer(tokenizer, tmp_path)
        tokenizer(["a", "bcd"], padding=bool(tokenizer.pad_token), truncation=True, max_length=2)
        assert tokenizer_fingerprint(tokenizer) == before
        assert tokenizer_fingerprint(load_tokenizer(tmp_path)) == before

    def test_fingerprint_tells_tokenizers_apart(self) -> None:
        made = [byte_tokenizer(), chatml(), chatml(eos="<|endoftext|>"), llama(), llama(LLAMA), spaced()]
        assert len({tokenizer_fingerprint(tokenizer) for tokenizer in made}) == len(made)


class TestTemplates:
    def test_auto_none_and_path(self, tmp_path: Any) -> None:
        assert resolve_template("auto", chatml()).source == CHATML
        assert resolve_template("auto", BYTES).source is None
        assert resolve_template("none", chatml()).source is None
        path = tmp_path / "t.jinja"
        path.write_text(PLAIN)
        template = resolve_template(str(path), chatml())
        encoded = encode_record({"prompt": "a", "response": "b"}, chatml(), template)
        assert chatml().decode(encoded.input_ids) == "### user:\na\n\n### assistant:\nb<|im_end|>"
        assert template.as_meta()["text"] == PLAIN

    def test_generation_tag_is_accepted(self, tmp_path: Any) -> None:
        path = tmp_path / "t.jinja"
        marked = "{% generation %}{{ m.content }}{% endgeneration %}"
        path.write_text(CHATML.replace("{{ m.content }}", marked))
        template = resolve_template(str(path), chatml())
        encoded = encode_record({"prompt": "a", "response": "b"}, chatml(), template)
        assert trained(chatml(), encoded) == ["b<|im_end|>"]

    def test_errors(self, tmp_path: Any) -> None:
        with pytest.raises(DataError, match="cannot be read"):
            resolve_template(str(tmp_path / "missing"), BYTES)
        (tmp_path / "bad").write_text("a\n{% if %}")
        with pytest.raises(DataError, match="line 2"):
            resolve_template(str(tmp_path / "bad"), BYTES)
