"""Loading a model and its tokenizer: what cannot be used is refused in words, what is used is complete."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
)

from tests.tiny import CHAT_TEMPLATE, NUM_TOKENS, build_model, build_tokenizer, save
from tests.trainers.harness import make_trainer
from tuning.config.configs import ModelArguments
from tuning.errors import ModelError
from tuning.models import loader
from tuning.models.loader import (
    attention_name,
    find_checkpoint,
    load_config,
    load_model,
    load_tokenizer,
    resize_embeddings_,
    weights_dtype,
)

FLOAT = {"dtype": torch.float32, "attn_implementation": "eager"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    save(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """Return a folder with a complete checkpoint, to be broken."""
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def model_args(name, **values) -> ModelArguments:
    return ModelArguments(model_name_or_path=str(name), **values)


def find(name, **values):
    return find_checkpoint(model_args(name, **values))


def tokenizer_of(name, *, tokenizer_name=None, **values):
    args = model_args(name, tokenizer_name_or_path=tokenizer_name)
    return load_tokenizer(args, find_checkpoint(args), **values)


def refusal(function, *args, **values) -> str:
    with pytest.raises(ModelError) as caught:
        function(*args, **values)
    return str(caught.value)


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def load(folder):
    checkpoint = find(folder)
    load_config(checkpoint)
    return load_model(checkpoint, FLOAT)


# ---- where it is ----


def test_a_complete_checkpoint(folder):
    checkpoint = find(folder, model_revision="main")
    assert (checkpoint.name, dict(checkpoint.kwargs)) == (
        str(folder),
        {"trust_remote_code": False, "revision": "main"},
    )
    assert load_config(checkpoint).model_type == "llama"
    model = load(folder)
    ids = torch.tensor([[1, 20, 30, 40]])
    assert torch.equal(model(input_ids=ids).logits, build_model()(input_ids=ids).logits)
    assert model.dtype == torch.float32


def test_a_folder_below_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find("~/model").name == str(folder)


def test_a_hub_name_is_not_looked_for_on_disk():
    assert find("someone/model", model_revision="v1").kwargs["revision"] == "v1"
    assert find("model").name == "model"


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "models/a/b", "../x"])
def test_a_path_that_does_not_exist(name, tmp_path, monkeypatch):
    # an empty folder of our own: what lies beside the repository is nobody's business
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert refusal(find, name) == (
        f"--model_name_or_path {name} does not exist; give a folder, a .gguf file or a hub name"
    )


def test_a_folder_without_config(folder):
    (folder / "config.json").unlink()
    start = f"--model_name_or_path {folder} has no config.json, so it holds no checkpoint"
    assert refusal(find, folder) == f"{start}; give the folder of a saved model"
    (folder / "some.gguf").touch()
    assert refusal(find, folder) == f"{start}; add --gguf_file some.gguf"
    (folder / "adapter_config.json").touch()
    assert refusal(find, folder) == (
        f"{start} but an adapter; give the model that it was trained on, or merge the two first"
    )


@pytest.mark.parametrize(
    ("size", "fault"), [(None, "its weights are missing"), (100, "model.safetensors is cut short")]
)
def test_weights_that_are_not_complete(folder, size, fault):
    path = folder / "model.safetensors"
    content = path.read_bytes()[:size]
    path.unlink()
    if size is not None:
        path.write_bytes(content)
    assert refusal(find, folder) == (
        f"--model_name_or_path {folder} holds no complete checkpoint: {fault}; give a folder with config.json and "
        "model.safetensors or pytorch_model.bin, whole or in shards"
    )


def test_a_file_that_is_no_gguf_file(folder):
    path = folder / "config.json"
    assert refusal(find, path) == (
        f"--model_name_or_path {path} is a file but no .gguf file; give the folder it is in, or a .gguf file"
    )


# ---- gguf ----


def test_a_gguf_file_by_either_name(folder, monkeypatch):
    monkeypatch.setattr(loader, "installed_version", lambda name: "0.17")
    (folder / "a.gguf").touch()
    for checkpoint in (find(folder / "a.gguf"), find(folder, gguf_file="a.gguf")):
        assert (checkpoint.name, checkpoint.kwargs["gguf_file"]) == (str(folder), "a.gguf")


def test_a_gguf_file_without_the_package_that_reads_it(folder, monkeypatch):
    monkeypatch.setattr(loader, "installed_version", lambda name: None)
    (folder / "a.gguf").touch()
    assert refusal(find, folder / "a.gguf") == (
        "--model_name_or_path names the GGUF file a.gguf, but the package gguf that reads it is not installed; "
        "pip install gguf"
    )


def test_a_gguf_file_that_is_not_there(folder):
    assert refusal(find, folder, gguf_file="b.gguf") == (
        f"--gguf_file b.gguf is not in {folder}; give the name of a file in that folder"
    )


def test_a_gguf_file_that_is_cut_short(folder, monkeypatch):
    pytest.importorskip("gguf")
    for content in (b"GGUF", b"no gguf file at all and rather long"):
        (folder / "a.gguf").write_bytes(content)
        text = refusal(load_config, find(folder / "a.gguf"))
        assert text.startswith(f"The config of --model_name_or_path {folder / 'a.gguf'} cannot be read: ")


def write_gguf(path, model):
    """Write ``model`` as a GGUF file of full precision, its tokens named by number."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([str(number) for number in range(config.vocab_size)])
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
        "model.layers": "blk",
    }  # fmt: skip
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        for kind, num_heads in heads.items():
            if kind in name:  # rotary pairs lie side by side there
                halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
                weight = halves.transpose(1, 2).reshape(weight.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_weights_of_a_gguf_file_are_loaded_and_saved_as_any_other(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", build_model())
    checkpoint = find(tmp_path / "tiny.gguf")
    assert load_config(checkpoint).vocab_size == 272
    model = load_model(checkpoint, FLOAT)
    ids = torch.tensor([[1, 20, 30, 40, 50]])
    torch.testing.assert_close(model(input_ids=ids).logits, build_model()(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    assert not getattr(model, "is_quantized", False)
    trained = make_trainer(tmp_path / "run", model, [[1, 20, 30, 40]], learning_rate=0.0)
    trained.train()
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    again = load_model(find(tmp_path / "saved"), FLOAT)
    torch.testing.assert_close(again(input_ids=ids).logits, build_model()(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


# ---- config ----


def test_a_config_that_is_no_json_object(folder):
    path = folder / "config.json"
    path.write_text("{")
    assert refusal(find, folder) == (
        f"{path} cannot be read (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); give "
        "the folder of a saved model"
    )
    path.write_bytes(b"\xff\xfe")
    assert refusal(find, folder).startswith(f"{path} cannot be read ('utf-8' codec can't decode byte 0xff")
    path.write_text("[]")
    assert refusal(find, folder) == f"{path} is no JSON object; give the folder of a saved model"


@pytest.mark.parametrize("text", ["{}", '{"model_type": "unheard_of"}'])
def test_a_config_that_transformers_does_not_know(folder, text):
    (folder / "config.json").write_text(text)
    message = refusal(load_config, find(folder))
    assert message.startswith(f"The config of --model_name_or_path {folder} cannot be read: ")
    assert message.endswith("; give the folder of a saved model, or a hub name that can be reached")
    assert ".;" not in message


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 5}, "is not a multiple of the number of attention heads"),
        ({"num_attention_heads": 0}, "ZeroDivisionError: "),
        ({"dtype": "float7"}, "float7"),
        ({"hidden_act": "gelu2"}, "KeyError: 'gelu2'"),
        ({"pad_token_id": 9999}, "AssertionError: Padding_idx must be within num_embeddings"),
    ],
)
def test_a_value_of_the_config_that_cannot_be(folder, values, why):
    edit_config(folder, **values)
    text = refusal(load, folder)
    assert f"--model_name_or_path {folder} cannot be " in text
    assert why in text
    assert "\n" not in text


@pytest.mark.parametrize("kwargs", [{"speed": 1}, {"attn_implementation": "magic"}])
def test_arguments_of_the_model_that_it_does_not_take(folder, kwargs):
    text = refusal(load_model, find(folder), {**FLOAT, **kwargs})
    assert text.endswith("; give a complete checkpoint, or correct --model_init_kwargs if they are the cause")
    assert next(iter(kwargs)) in text


def test_a_hub_that_cannot_be_reached(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("We couldn't connect to the hub.\nCheckout your internet connection")

    monkeypatch.setattr(loader.AutoConfig, "from_pretrained", refuse)
    assert refusal(load_config, find("someone/model")) == (
        "The config of --model_name_or_path someone/model cannot be read: We couldn't connect to the hub; give the "
        "folder of a saved model, or a hub name that can be reached"
    )


def test_a_model_that_does_not_generate(folder):
    T5Config(d_model=8, num_layers=1).save_pretrained(folder)
    assert refusal(load_config, find(folder)) == (
        f"--model_name_or_path {folder} is a t5 model, which transformers has no causal language model for; give a "
        "model that generates text token by token"
    )


# ---- weights ----


def test_a_checkpoint_without_head(folder):
    build_model().model.save_pretrained(folder)
    assert refusal(load, folder) == (
        f"The checkpoint {folder} lacks 1 weights of LlamaForCausalLM (lm_head.weight); they would start at random. "
        "Give a complete checkpoint of a causal language model"
    )


def test_a_checkpoint_without_head_is_complete_where_the_head_is_the_embedding(folder):
    build_model(is_tied=True).model.save_pretrained(folder)
    model = load(folder)
    assert torch.equal(model.lm_head.weight, build_model(is_tied=True).model.embed_tokens.weight)


def test_weights_that_are_missing(folder):
    edit_config(folder, num_hidden_layers=3)
    assert refusal(load, folder) == (
        f"The checkpoint {folder} lacks 9 weights of LlamaForCausalLM (model.layers.2.input_layernorm.weight, "
        "model.layers.2.mlp.down_proj.weight, model.layers.2.mlp.gate_proj.weight, ...); they would start at random. "
        "Give a complete checkpoint of a causal language model"
    )


def test_weights_of_other_sizes_than_the_config_says(folder):
    edit_config(folder, vocab_size=300)
    assert refusal(load, folder) == (
        f"The weights of {folder} do not have the sizes that its config.json says (lm_head.weight is [272, 32] and "
        "must be [300, 32], model.embed_tokens.weight is [272, 32] and must be [300, 32]); give a folder whose files "
        "belong together"
    )


def test_weights_that_are_not_used_are_told(folder, caplog):
    edit_config(folder, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING, logger="tuning"):
        load(folder)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("tuning.")] == [
        f"{folder} has 9 weights that LlamaForCausalLM does not use: model.layers.1.input_layernorm.weight, "
        "model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight, ..."
    ]


def test_weights_that_cannot_be_read(folder):
    checkpoint = find(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    message = refusal(load_model, checkpoint, FLOAT)
    assert message.startswith(f"The weights of --model_name_or_path {folder} cannot be loaded: ")
    assert message.endswith("; give a complete checkpoint")


def bert(**values) -> BertConfig:
    return BertConfig(
        vocab_size=272, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, **values
    )


def test_a_model_that_sees_the_tokens_to_come(folder):
    BertLMHeadModel(bert()).save_pretrained(folder)
    assert refusal(load, folder) == (
        f"--model_name_or_path {folder} is a bert model that looks at the tokens which come after the one it predicts, "
        "so it would learn to copy them; give a causal language model"
    )


def test_an_encoder_without_head(folder):
    BertModel(bert()).save_pretrained(folder)
    assert "weights of BertLMHeadModel" in refusal(load, folder)


def test_a_decoder_whose_config_calls_it_none(folder):
    config = GPTNeoXConfig(
        vocab_size=272, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    assert config.is_decoder is False
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    assert type(load(folder)) is GPTNeoXForCausalLM


# ---- dtype and attention ----


@pytest.mark.parametrize(
    ("word", "device", "dtype"),
    [
        (None, "cpu", torch.float32),
        (None, "cuda", torch.bfloat16),
        ("bfloat16", "cpu", torch.bfloat16),
        ("float16", "cuda", torch.float16),
        ("float32", "cuda", torch.float32),
        ("auto", "cpu", "auto"),
    ],
)
def test_dtype(word, device, dtype):
    assert weights_dtype(word, device_type=device) == dtype


def test_a_dtype_that_is_none():
    assert refusal(weights_dtype, "bf17", device_type="cpu") == (
        "--torch_dtype bf17 is not known; use bfloat16, float16, float32 or auto"
    )


def test_a_model_starts_from_an_attention_that_every_device_has():
    assert attention_name(BertConfig()) == attention_name(GPTNeoXConfig()) == "sdpa"
    # state space models have none, and transformers refuses them with another
    assert attention_name(MambaConfig()) == "eager"
    model = MambaForCausalLM._from_config(
        MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=2),
        attn_implementation=attention_name(MambaConfig()),
    )
    assert model(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 2, 16)


# ---- tokenizer ----


def test_the_tokenizer_of_the_model(folder):
    loaded = tokenizer_of(folder)
    assert (len(loaded.tokenizer), loaded.added, loaded.tokenizer.pad_token) == (NUM_TOKENS, (), "<pad>")
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE


def test_a_tokenizer_from_elsewhere(folder, tmp_path):
    build_tokenizer(chat_template=None).save_pretrained(tmp_path / "other")
    assert tokenizer_of(folder, tokenizer_name=str(tmp_path / "other")).tokenizer.chat_template is None


def test_no_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert refusal(tokenizer_of, folder) == (
        f"{folder} has no tokenizer (tokenizer.json, tokenizer.model); give --tokenizer_name_or_path"
    )


def test_a_tokenizer_that_cannot_be_read(folder):
    (folder / "tokenizer.json").write_text("{")
    message = refusal(tokenizer_of, folder)
    assert message.startswith(f"No tokenizer can be loaded from {folder}: ")
    assert message.endswith("; give --tokenizer_name_or_path")


def test_without_a_pad_token_the_end_token_pads(folder, caplog):
    build_tokenizer(pad_token=None).save_pretrained(folder)
    with caplog.at_level(logging.INFO, logger="tuning"):
        loaded = tokenizer_of(folder)
    assert loaded.tokenizer.pad_token == "</s>"
    assert caplog.messages == ["the tokenizer has no pad token; padding uses </s>, told apart by the mask"]


def test_without_an_end_token(folder):
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    assert refusal(tokenizer_of, folder) == f"The tokenizer of {folder} has no end-of-sequence token; give --eos_token"
    assert tokenizer_of(folder, eos_token="<|end|>").tokenizer.eos_token == "<|end|>"


@pytest.mark.parametrize("flag", ["eos_token", "pad_token"])
def test_tokens_by_name(folder, flag):
    assert getattr(tokenizer_of(folder, **{flag: "<|end|>"}).tokenizer, flag) == "<|end|>"
    assert refusal(tokenizer_of, folder, **{flag: "<|stop|>"}) == (
        f"--{flag} <|stop|> is not in the vocabulary of {folder}; add it with --add_special_tokens"
    )
    # what the message advises works
    loaded = tokenizer_of(folder, add_special_tokens=["<|stop|>"], **{flag: "<|stop|>"})
    assert getattr(loaded.tokenizer, flag) == "<|stop|>"
    assert loaded.tokenizer.convert_tokens_to_ids("<|stop|>") == NUM_TOKENS


def test_special_tokens_are_added_once_and_are_special(folder):
    loaded = tokenizer_of(folder, add_special_tokens=["<a>", "<|user|>", "<b>", "<a>"])
    assert loaded.added == ("<a>", "<b>")
    assert len(loaded.tokenizer) == NUM_TOKENS + 2
    ids = loaded.tokenizer("x<b>y", add_special_tokens=False)["input_ids"]
    assert ids[1] == NUM_TOKENS + 1
    assert loaded.tokenizer.decode(ids, skip_special_tokens=True) == "xy"
    # those of before stay special
    assert loaded.tokenizer.decode(loaded.tokenizer("<|user|>x")["input_ids"], skip_special_tokens=True) == "x"


def test_chat_templates(folder, tmp_path):
    assert tokenizer_of(folder, chat_template="{{ messages }}").tokenizer.chat_template == "{{ messages }}"
    path = tmp_path / "chat.jinja"
    path.write_text("{{ 'Ä' }}", encoding="utf-8")
    assert tokenizer_of(folder, chat_template=str(path)).tokenizer.chat_template == "{{ 'Ä' }}"
    assert refusal(tokenizer_of, folder, chat_template="no/such/file") == (
        "--chat_template no/such/file is neither a Jinja template nor a file; give one of them"
    )
    path.write_bytes(b"\xff\xfe\x00")
    message = refusal(tokenizer_of, folder, chat_template=str(path))
    assert message.startswith(f"--chat_template {path} cannot be read as UTF-8 text (")
    assert message.endswith("); correct it")


# ---- rows of the embedding ----


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    ("tokens", "multiple_of", "rows"),
    [(266, 1, 272), (272, 1, 272), (268, 64, 272), (276, 1, 276), (276, 64, 320), (320, 64, 320)],
)
def test_rows_grow_and_never_shrink(is_tied, tokens, multiple_of, rows):
    model = build_model(is_tied=is_tied)
    before = [layer.weight.detach().clone() for layer in (model.get_input_embeddings(), model.get_output_embeddings())]
    assert resize_embeddings_(model, tokens, multiple_of=multiple_of) == rows - 272
    after = [layer.weight.detach() for layer in (model.get_input_embeddings(), model.get_output_embeddings())]
    for old, new in zip(before, after, strict=True):
        assert new.shape[0] == rows
        assert torch.equal(new[:272], old)
        assert torch.equal(new[272:], old.mean(0).expand(rows - 272, -1))
    assert model.config.vocab_size == rows
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is is_tied


def test_growing_draws_nothing_at_random():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with torch.random.fork_rng(devices=[]):
        resize_embeddings_(build_model(), 300)
    assert torch.equal(torch.rand(1), expected)
    grown = [build_model() for _ in range(2)]
    for model in grown:
        resize_embeddings_(model, 300)
    assert torch.equal(grown[0].lm_head.weight, grown[1].lm_head.weight)
