import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.equivalence.families import build_model
from tuning.models.causal_loss import HeadInputs, next_labels, with_head_loss, with_logits_loss

IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
LABELS = torch.tensor([[-100, 4, -100, 6], [-100, -100, 9, 10]])


def plain(inputs: HeadInputs):
    """The loss of a head in plain torch."""
    logits = inputs.hidden_TD @ inputs.weight_VD.t()
    if inputs.bias_V is not None:
        logits = logits + inputs.bias_V
    if inputs.low_rank is not None:
        logits = logits + inputs.low_rank[0] @ inputs.low_rank[1].t()
    return {"nll_sum": torch.nn.functional.cross_entropy(logits, inputs.labels_T, reduction="sum"), "logits": logits}


def expected(model):
    return model(input_ids=IDS, labels=LABELS).loss * 4


def test_labels_are_those_of_the_next_position():
    assert next_labels(LABELS).tolist() == [4, -100, 6, -100, -100, 9, 10, -100]
    assert next_labels(LABELS[0]).tolist() == [4, -100, 6, -100]


def test_the_head_answers_and_logits_are_never_whole():
    model = build_model("llama")
    logits = model(input_ids=IDS).logits
    with with_head_loss(model, layer="lm_head", compute=plain):
        terms = model(input_ids=IDS, labels=LABELS, fast_loss=True)
        assert set(terms) == {"nll_sum", "logits"}
        assert torch.allclose(terms["logits"], logits.reshape(8, -1), atol=1e-6)
        assert torch.allclose(terms["nll_sum"], expected(model), atol=1e-4)
        # anything else is as before
        assert torch.equal(model(input_ids=IDS).logits, logits)
    assert "forward" not in model.__dict__
    assert "forward" not in model.lm_head.__dict__


def test_the_logits_answer():
    model = build_model("gemma2")
    with with_logits_loss(
        model,
        compute=lambda logits, labels: {"nll_sum": torch.nn.functional.cross_entropy(logits, labels, reduction="sum")},
    ):
        terms = model(input_ids=IDS, labels=LABELS, fast_loss=True)
        assert torch.allclose(terms["nll_sum"], expected(model), atol=1e-4)
    assert "forward" not in model.__dict__


def test_what_is_known_of_the_batch_reaches_the_head_and_nothing_else():
    model = build_model("llama")
    seen = []
    index = torch.tensor([0, 2])
    with with_head_loss(model, layer="lm_head", compute=lambda inputs: seen.append(inputs) or plain(inputs)):
        model(input_ids=IDS, labels=LABELS, fast_loss=True, supervised_index=index, loss_factor=0.5)
        model(input_ids=IDS, supervised_index=index, loss_factor=0.5)
    (inputs,) = seen
    assert inputs.supervised_index is index
    assert inputs.loss_factor.item() == 0.5
    assert inputs.loss_factor.dtype == torch.float32
    assert inputs.bias_V is None
    assert inputs.low_rank is None


@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}],
)
def test_adapters_of_the_head(options):
    model = get_peft_model(build_model("llama"), LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    inner = model.base_model.model
    with with_head_loss(inner, layer="lm_head", compute=plain):
        terms = model(input_ids=IDS, labels=LABELS, fast_loss=True)
        assert torch.allclose(terms["nll_sum"], expected(model), rtol=1e-5)
        with model.disable_adapter():
            terms = model(input_ids=IDS, labels=LABELS, fast_loss=True)
            assert torch.allclose(terms["nll_sum"], expected(model), rtol=1e-5)


def test_the_auxiliary_loss_of_experts_is_among_the_terms():
    model = build_model("mixtral", output_router_logits=True)
    with with_head_loss(model, layer="lm_head", compute=plain):
        terms = model(input_ids=IDS, labels=LABELS, fast_loss=True)
        assert torch.equal(terms["aux_loss"], model(input_ids=IDS).aux_loss)


def test_a_forward_that_never_reaches_its_head_is_an_error():
    model = build_model("llama")
    model.lm_head.forward = lambda hidden: hidden[..., :1]
    with with_head_loss(model, layer="lm_head", compute=plain):
        model.lm_head.forward = lambda hidden: hidden[..., :1]
        with pytest.raises(RuntimeError, match="LlamaForCausalLM ran without calling its head"):
            model(input_ids=IDS, labels=LABELS, fast_loss=True)


def test_an_exception_leaves_no_request_behind():
    model = build_model("llama")
    with with_head_loss(model, layer="lm_head", compute=plain):
        with pytest.raises(Exception, match=r"index|range"):
            model(input_ids=IDS + 1000, labels=LABELS, fast_loss=True)
        assert model(input_ids=IDS).logits.shape == (2, 4, 67)


def test_the_signature_stays():
    import inspect

    model = build_model("llama")
    before = list(inspect.signature(model.forward).parameters)
    with with_head_loss(model, layer="lm_head", compute=plain):
        assert list(inspect.signature(model.forward).parameters)[:3] == before[:3]
