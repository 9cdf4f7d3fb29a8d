"""Adapters: which modules get one, what trains in full beside them, and that a saved adapter is the one in memory.

Public reports: https://github.com/huggingface/peft/issues/1457 and https://github.com/huggingface/peft/issues/1300
(added tokens), https://github.com/hiyouga/LlamaFactory/issues/8399 (chat template missing).
"""

from __future__ import annotations

import logging

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tests.tiny import CHAT_TEMPLATE, build_model, save
from tests.trainers.harness import arguments, dataset
from tuning.config.configs import ModelArguments
from tuning.config.peft_config import LoraConfig, PromptTuningConfig
from tuning.data.collators import PaddedCollator
from tuning.errors import ConfigError, ModelError
from tuning.models import adapters
from tuning.models.loader import find_checkpoint, load_model, load_tokenizer, resize_embeddings_
from tuning.seats import Seats
from tuning.trainers.fit import fit, restored
from tuning.trainers.sft import SFTTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # what we want; https://github.com/huggingface/peft/issues/1300
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def build(config, *, tokenizer_name="none", has_new_tokens=False):
    return adapters.build_peft_config(config, tokenizer_name=tokenizer_name, has_new_tokens=has_new_tokens)


def trained(model) -> list[str]:
    """Return what trains in full beside the adapters."""
    return [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]


def adapted(model) -> set[str]:
    return {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_A" in name}


def refusal(model, **values) -> str:
    with pytest.raises(ModelError) as caught:
        adapters.wrap(model, build(LoraConfig(**values)))
    return str(caught.value)


# ---- our flags to peft's config ----


def test_no_flag_is_full_fine_tuning_and_peft_configs_pass():
    assert build(None) is None
    own = peft.LoraConfig(task_type="CAUSAL_LM", r=3)
    assert build(own) is own


def test_lora_values_reach_peft():
    config = build(
        LoraConfig(r=4, lora_alpha=12, bias="all", lora_dropout=0.25, use_rslora=True, target_modules=["q_proj"])
    )
    assert (config.r, config.lora_alpha, config.bias, config.lora_dropout) == (4, 12, "all", 0.25)
    assert (config.use_rslora, config.use_dora) == (True, False)
    assert config.target_modules == {"q_proj"}
    assert config.task_type == "CAUSAL_LM"
    assert config.modules_to_save is None
    assert build(LoraConfig(use_dora=True)).use_dora is True


@pytest.mark.parametrize("names", [None, ["all-linear"]])
def test_all_linear_layers_get_an_adapter_by_default(names, caplog):
    with caplog.at_level(logging.INFO, logger="tuning"):
        model = adapters.wrap(build_model(), build(LoraConfig(r=4, target_modules=names)))
    assert adapted(model) == LINEAR
    assert trained(model) == []
    trainable, total = model.get_nb_trainable_parameters()
    share = f"{100 * trainable / total:.2f}"
    assert caplog.messages == [f"training {trainable:,} of {total:,} parameters ({share} %)"]


def test_modules_by_name():
    assert adapted(adapters.wrap(build_model(), build(LoraConfig(target_modules=["v_proj", "mlp.up_proj"])))) == {
        "v_proj",
        "up_proj",
    }


@pytest.mark.parametrize(
    ("values", "said"),
    [({"r": 0}, "`r` should be a positive integer value but the value passed is 0"), ({"lora_dropout": 1.5}, "1.5")],
)
def test_values_that_peft_refuses(values, said):
    message = refusal(build_model(), **values)
    assert message.startswith("The adapters do not fit LlamaForCausalLM: ")
    assert said in message


@pytest.mark.parametrize("flag", ["target_modules", "modules_to_save"])
def test_every_name_must_be_in_the_model(flag):
    # peft takes what it finds and says nothing of the rest
    assert refusal(build_model(), **{flag: ["q_proj", "w_proj", "x"]}) == (
        f"--{flag} names w_proj, x, which LlamaForCausalLM does not have; its modules are down_proj, embed_tokens, "
        "gate_proj, input_layernorm, k_proj, lm_head, norm, o_proj, post_attention_layernorm, q_proj, up_proj, v_proj"
    )


def test_the_head_gets_no_adapter():
    assert refusal(build_model(), target_modules=["q_proj", "lm_head"]) == (
        "--target_modules names lm_head, the head, whose output the loss computes in parts without calling it, so an "
        "adapter there would never train; drop it, or train the head in full by --modules_to_save"
    )


def test_the_users_config_is_left_as_it_is():
    own = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", modules_to_save=["embed_tokens"])
    adapters.wrap(build_model(is_tied=True), own)
    assert own.modules_to_save == ["embed_tokens"]
    assert not own.ensure_weight_tying


# ---- prompt tuning ----


def test_prompt_tuning_from_a_text(tmp_path):
    name = save(tmp_path)
    text = PromptTuningConfig(prompt_tuning_init_text="ab", num_virtual_tokens=3)
    config = build(text, tokenizer_name=name)
    model = adapters.wrap(build_model(), config)
    assert trained(model) == ["prompt_encoder.default.embedding.weight"]
    embedding = build_model().get_input_embeddings().weight
    start = AutoTokenizer.from_pretrained(name)("ab")["input_ids"]
    expected = embedding[[start[0], start[1], start[0]]]
    assert torch.equal(model.prompt_encoder["default"].embedding.weight, expected)


def test_prompt_tuning_from_random_values():
    config = build(PromptTuningConfig(prompt_tuning_init="RANDOM", num_virtual_tokens=5))
    assert (config.num_virtual_tokens, config.prompt_tuning_init_text, config.tokenizer_name_or_path) == (5, None, None)
    assert adapters.wrap(build_model(), config).prompt_encoder["default"].embedding.weight.shape == (5, 32)


def test_prompt_tuning_cannot_train_new_tokens():
    with pytest.raises(ConfigError) as caught:
        build(PromptTuningConfig(), has_new_tokens=True)
    assert str(caught.value) == (
        "--add_special_tokens with --peft_method pt would leave the new tokens untrained, since prompt tuning trains "
        "virtual tokens alone; use --peft_method lora or none"
    )


def test_prompt_tuning_trains_and_counts_the_samples_tokens_alone(tmp_path):
    model = adapters.wrap(build_model(), build(PromptTuningConfig(prompt_tuning_init="RANDOM", num_virtual_tokens=4)))
    before = model.prompt_encoder["default"].embedding.weight.detach().clone()
    with restored(model):
        trainer = run(tmp_path, model, [[1, 20, 30, 2], [1, 40, 2]], per_device_train_batch_size=2)
    assert not torch.equal(before, model.prompt_encoder["default"].embedding.weight)
    line = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert (line["num_tokens"], line["supervised_tokens"]) == (7, 5)
    # by hand: the loss of the same rows after the same virtual tokens
    rows = [([1, 20, 30, 2], 3), ([1, 40, 2], 2)]
    fresh = adapters.wrap(build_model(), build(PromptTuningConfig(prompt_tuning_init="RANDOM", num_virtual_tokens=4)))
    fresh.prompt_encoder["default"].embedding.weight.data.copy_(before)
    total = 0.0
    for ids, _ in rows:
        logits = fresh.eval()(input_ids=torch.tensor([ids])).logits[0, 4:]
        total += torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum").item()
    assert line["loss"] == pytest.approx(total / 5, rel=1e-5)


# ---- embedding and head beside the adapters ----


def gpt2():
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=32, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_new_tokens_train_embedding_and_head_in_any_family(caplog):
    config = build(LoraConfig(), has_new_tokens=True)
    assert config.modules_to_save == ["embed_tokens", "lm_head"]
    assert trained(adapters.wrap(build_model(), config)) == [
        "base_model.model.model.embed_tokens.modules_to_save.default.weight",
        "base_model.model.lm_head.modules_to_save.default.weight",
    ]
    # another family calls its embedding otherwise
    assert trained(adapters.wrap(gpt2(), config)) == [
        "base_model.model.transformer.wte.modules_to_save.default.weight",
        "base_model.model.lm_head.modules_to_save.default.weight",
    ]


def test_new_tokens_come_beside_what_was_asked_for():
    config = build(LoraConfig(modules_to_save=["norm", "lm_head"]), has_new_tokens=True)
    assert config.modules_to_save == ["norm", "lm_head", "embed_tokens"]


@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_what_shares_a_weight_goes_on_sharing_it(names, recwarn):
    model = adapters.wrap(build_model(is_tied=True), build(LoraConfig(modules_to_save=names)))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert len(trained(model)) == 1
    assert [str(w.message) for w in recwarn if "tie" in str(w.message)] == []


# ---- there and back ----


def run(folder, model, rows, *, tokenizer=None, added=(), **values) -> SFTTrainer:
    from tests.tiny import build_tokenizer

    trainer = SFTTrainer(
        model,
        arguments(folder, **{"learning_rate": 0.1, **values}),
        train_dataset=dataset(rows),
        eval_dataset=None,
        tokenizer=tokenizer or build_tokenizer(),
        seats=Seats(collator=PaddedCollator(0)),
    )
    fit(trainer, None, added_tokens=added)
    return trainer


IDS = torch.tensor([[1, 266, 267, 20, 2]])


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("num_added", "multiple_of", "rows"), [(2, 1, 272), (10, 1, 276), (10, 64, 320)])
def test_an_adapter_with_new_tokens_comes_back_as_it_was(tmp_path, is_tied, num_added, multiple_of, rows):
    base = save(tmp_path / "base", model=build_model(is_tied=is_tied))
    args = ModelArguments(model_name_or_path=base)
    checkpoint = find_checkpoint(args)
    loaded = load_tokenizer(args, checkpoint, add_special_tokens=[f"<new{n}>" for n in range(num_added)])
    model = load_model(checkpoint, {"dtype": torch.float32, "attn_implementation": "eager"})
    resize_embeddings_(model, len(loaded.tokenizer), multiple_of=multiple_of)
    torch.manual_seed(0)
    model = adapters.wrap(model, build(LoraConfig(r=4), has_new_tokens=True))
    start = model.get_input_embeddings().weight.detach().clone()
    with restored(model):
        run(
            tmp_path / "out",
            model,
            [[1, 266, 267, 20, 2], [1, 267, 266, 20, 2]],
            tokenizer=loaded.tokenizer,
            added=loaded.added,
            save_strategy="steps",
            save_steps=2,
        )
    assert model.get_input_embeddings().weight.shape[0] == rows
    trained_rows = model.get_input_embeddings().weight.detach()
    assert not torch.equal(trained_rows[266], start[266])
    expected = logits(model)
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert len(tokenizer) == 266 + num_added
        assert tokenizer.chat_template == CHAT_TEMPLATE
        assert (folder / "added_tokens_info.json").is_file()
        again = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
        resize_embeddings_(again, len(tokenizer), multiple_of=multiple_of)
        again = peft.PeftModel.from_pretrained(again, folder).eval()
        assert torch.equal(again.get_input_embeddings().weight, trained_rows)
        torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-5)
    if multiple_of == 1:
        # peft's own one-line way, which knows the tokenizer's length alone
        auto = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
        torch.testing.assert_close(logits(auto), expected, rtol=0, atol=1e-5)


def test_a_base_without_the_adapter_gives_something_else(tmp_path):
    # so that the comparison above can fail
    model = adapters.wrap(build_model(), build(LoraConfig(r=4)))
    with restored(model):
        run(tmp_path, model, [[1, 20, 30, 20, 2]] * 3)
    ids = torch.tensor([[1, 20, 30]])
    with torch.no_grad():
        assert (model(input_ids=ids).logits - build_model()(input_ids=ids).logits).abs().max() > 1e-2
