"""What the losses of transformers' models are the means of, found out by trying; no device, no processes."""

import pytest
import torch
import transformers as hf
from torch.nn.functional import cross_entropy

pytest.importorskip("accelerate")

from torchacc.integrations.hf.losses import MeanOf, Smoother, class_name, find_mean

LENGTH, ROWS = 8, 4
BERT = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}


def bert(name, **changed):
    return getattr(hf, name)(hf.BertConfig(**BERT, **changed))


def sequences(labels=None, **more):
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 31
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(tokens % 5 == 0, -100) if labels is None else labels,
    } | more


def answers():
    return {"input_ids": sequences()["input_ids"], "start_positions": torch.arange(4), "end_positions": torch.arange(4)}


def from_model(model, inputs, num_items):
    takes = isinstance(model, hf.GPT2LMHeadModel | hf.MixtralForCausalLM)
    return model(**inputs, **({"num_items_in_batch": num_items} if takes else {})).loss


def smoothed(model, inputs, num_items):
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    return Smoother(0.1, class_name(model))(model(**inputs), labels)


def mean_of_rows_means(model, inputs, num_items):
    labels = inputs["labels"][:, 1:]
    losses = cross_entropy(model(inputs["input_ids"]).logits[:, :-1].transpose(1, 2), labels, reduction="none")
    return (losses.sum(1) / labels.ne(-100).sum(1)).mean()


def sum_of_all(model, inputs, num_items):
    return model(**inputs).loss * inputs["labels"].ne(-100).sum()


def gpt2():
    return hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0))


def mixtral():
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = hf.MixtralConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, **heads)
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    return hf.MixtralForCausalLM(config)


def t5():
    return hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0, pad_token_id=0))


CLASSES = torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize(
    ("make", "inputs", "loss", "expected"),
    [
        (gpt2, sequences(), from_model, MeanOf.STEP),
        (mixtral, sequences(), from_model, MeanOf.STEP),
        (gpt2, sequences(), smoothed, MeanOf.NEXT_LABELS),
        (gpt2, sequences(), mean_of_rows_means, MeanOf.UNKNOWN),
        (lambda: bert("BertForMaskedLM"), sequences(), from_model, MeanOf.LABELS),
        (lambda: bert("BertForMaskedLM"), sequences(), smoothed, MeanOf.LABELS),
        (lambda: bert("BertForMaskedLM"), sequences(), sum_of_all, MeanOf.UNKNOWN),
        (lambda: bert("BertForTokenClassification", num_labels=31), sequences(), from_model, MeanOf.LABELS),
        (lambda: bert("BertForSequenceClassification", num_labels=3), sequences(CLASSES), from_model, MeanOf.LABELS),
        (lambda: bert("BertForSequenceClassification", num_labels=1), sequences(CLASSES / 2), from_model, MeanOf.ROWS),
        (lambda: bert("BertForQuestionAnswering"), answers(), from_model, MeanOf.ROWS),
        (
            lambda: bert("BertForPreTraining"),
            sequences(next_sentence_label=CLASSES % 2),
            from_model,
            MeanOf.UNKNOWN,
        ),
        (t5, sequences(decoder_input_ids=sequences()["input_ids"]), from_model, MeanOf.LABELS),
    ],
)
def test_what_a_loss_is_the_mean_of_is_found(make, inputs, loss, expected):
    torch.manual_seed(0)
    model = make().eval()
    names = [name for name in inputs if "label" in name or "positions" in name]
    with torch.no_grad():
        found = find_mean(
            lambda tried, num_items: float(loss(model, tried, num_items)), inputs, names, lambda own: [own]
        )
    assert found is expected


def test_processes_that_find_different_means_agree_on_none():
    model = bert("BertForMaskedLM").eval()
    others = iter([[[MeanOf.UNKNOWN]] * 2, [[MeanOf.LABELS], [MeanOf.NEXT_LABELS]]])
    with torch.no_grad():
        found = find_mean(
            lambda tried, num_items: float(from_model(model, tried, num_items)),
            sequences(),
            ["labels"],
            lambda own: next(others),
        )
    assert found is MeanOf.UNKNOWN


def test_too_few_labels_leave_the_choice_to_other_processes():
    model = bert("BertForSequenceClassification", num_labels=3).eval()
    one = {"input_ids": sequences()["input_ids"][:1], "labels": torch.tensor([2])}
    with torch.no_grad():
        found = find_mean(
            lambda tried, num_items: float(from_model(model, tried, num_items)), one, ["labels"], lambda own: [own]
        )
    assert found is MeanOf.LABELS
