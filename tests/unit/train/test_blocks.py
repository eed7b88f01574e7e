import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value, load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchacc.data import shard_loader
from torchacc.errors import DataError
from torchacc.parallel.sequence_split import IGNORE_INDEX
from torchacc.train.blocks import Blocks, StreamedBlocks, TokenDocuments, held_out_mask, make_block
from torchacc.train.text import PACKING_FAMILIES

PAD = 0
BLOCK = 8
# One that fills blocks by itself, one that ends with a block, ones that share one, and a single token.
DOCUMENTS = [np.arange(size) + 100 * index for index, size in enumerate((19, 5, 8, 1, 2, 13), start=1)]
EVERY_PACKING = pytest.mark.parametrize("packing", [True, "concat", False])


def in_memory(documents):
    return Dataset.from_dict({"tokens": documents}, features=Features({"tokens": List(Value("uint16"))}))


@pytest.fixture
def tokenised(tmp_path):
    in_memory(DOCUMENTS).save_to_disk(tmp_path / "tokens", num_shards=3)
    return load_from_disk(tmp_path / "tokens")


@pytest.fixture
def documents(tokenised):
    return TokenDocuments(tokenised)


def stream(packing, documents=DOCUMENTS):
    return StreamedBlocks(lambda order: documents, BLOCK, packing, PAD, seed=0)


def equal(blocks, others):
    return [{name: values.tolist() for name, values in block.items()} for block in blocks] == [
        {name: values.tolist() for name, values in block.items()} for block in others
    ]


def test_documents_of_a_block_are_apart():
    block = make_block(np.array([7, 8, 9, 1, 2, 3]), np.array([3, 5]), BLOCK, pad_id=PAD, isolate=True)
    assert block["input_ids"].tolist() == [7, 8, 9, 1, 2, 3, PAD, PAD]
    assert block["labels"].tolist() == [7, 8, 9, IGNORE_INDEX, 2, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]
    assert block["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert {(values.dtype, values.shape) for values in block.values()} == {(torch.int64, (BLOCK,))}


def test_concatenated_documents_are_targets_of_one_another():
    block = make_block(np.array([7, 8, 9, 1, 2]), np.array([3]), BLOCK, pad_id=PAD, isolate=False)
    assert block.keys() == {"input_ids", "labels"}
    assert block["labels"].tolist() == [7, 8, 9, 1, 2, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]


@EVERY_PACKING
def test_every_token_is_in_one_block_in_order(documents, packing):
    blocks = Blocks(documents, BLOCK, packing, PAD)
    seen = [token for block in blocks for token in block["input_ids"].tolist() if token != PAD]
    assert seen == np.concatenate(DOCUMENTS).tolist()
    assert len(seen) == blocks.documents.starts[-1]
    assert len(blocks) == {True: 6, "concat": 6, False: 3 + 1 + 1 + 1 + 1 + 2}[packing]


def test_without_packing_a_block_holds_one_document(documents):
    for block in Blocks(documents, BLOCK, False, PAD):
        tokens = block["input_ids"][block["labels"] != IGNORE_INDEX]
        assert len(set((tokens // 100).tolist())) == 1
        assert block.keys() == {"input_ids", "labels"}


def test_a_target_belongs_to_the_document_of_the_token_before_it(documents):
    for block in Blocks(documents, BLOCK, True, PAD):
        targets = block["labels"][1:]
        learnt = targets != IGNORE_INDEX
        assert torch.equal(block["input_ids"][:-1][learnt] + 1, targets[learnt])  # documents count up


@EVERY_PACKING
def test_a_stream_gives_the_same_blocks(documents, packing):
    assert equal(stream(packing), Blocks(documents, BLOCK, packing, PAD))


def test_blocks_are_indexed_like_a_list_and_travel_to_workers(documents):
    blocks = Blocks(documents, BLOCK, True, PAD)
    assert equal([blocks[-1]], [blocks[len(blocks) - 1]])
    with pytest.raises(IndexError, match="example 6 of 6"):
        blocks[6]
    sent = pickle.dumps(blocks)
    assert len(sent) < 4000
    assert equal(pickle.loads(sent), blocks)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.99])
def test_documents_that_are_held_out_and_the_others_are_all(tokenised, share):
    train, held_out = (TokenDocuments(tokenised, share, held_out=held) for held in (False, True))
    assert len(train) + len(held_out) == len(DOCUMENTS)
    assert len(held_out) == max(int(len(DOCUMENTS) * share), share > 0)
    found = [of.read(*of.starts[i : i + 2]).tolist() for of in (train, held_out) for i in range(len(of))]
    assert sorted(found) == [document.tolist() for document in DOCUMENTS]
    assert held_out_mask(3, share).tolist().count(True) == max(int(3 * share), share > 0)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.99])
def test_a_single_document_is_cut(share):
    one = in_memory(DOCUMENTS[:1])
    train, held_out = (TokenDocuments(one, share, held_out=held) for held in (False, True))
    read = [of.read(0, of.starts[-1]).tolist() if len(of) else [] for of in (train, held_out)]
    assert sum(read, []) == DOCUMENTS[0].tolist()
    assert len(read[1]) == round(19 * share)


@pytest.mark.parametrize("num_epochs_before", [0, 1, 2])
def test_a_stream_is_found_again_at_its_position(num_epochs_before):
    def loader():
        def documents(order):
            return [DOCUMENTS[index] for index in np.random.default_rng(order).permutation(len(DOCUMENTS))]

        return shard_loader(
            DataLoader(StreamedBlocks(documents, BLOCK, True, PAD, seed=3)), data_parallel_size=2, shards=range(2)
        )

    def rest_of_epoch(of):
        return [batch["input_ids"].tolist() for batch in of]

    whole = loader()
    epochs = [rest_of_epoch(whole) for _ in range(4)]
    assert [len(epoch) for epoch in epochs] == [3] * 4
    assert all(epochs.count(epoch) == 1 for epoch in epochs)

    interrupted = loader()
    for _ in range(num_epochs_before):
        list(interrupted)
    batches = iter(interrupted)
    seen = [next(batches)["input_ids"].tolist()]
    in_epoch, over = interrupted.position(1, over=False), interrupted.position(3, over=True)

    resumed = loader()
    resumed.resume(in_epoch.to_json())
    assert seen + rest_of_epoch(resumed) == epochs[num_epochs_before]
    assert rest_of_epoch(resumed) == epochs[num_epochs_before + 1]
    resumed.resume(over.to_json())
    assert rest_of_epoch(resumed) == epochs[num_epochs_before + 1]


def test_a_stream_refuses_workers():
    batches = iter(DataLoader(stream(True), num_workers=1))
    with pytest.raises(DataError, match=r"write num_workers=0"):
        next(batches)
    batches._shutdown_workers()


SMALL = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rotary_dim": 8},
    **{"num_experts": 4, "num_local_experts": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
    **{"n_routed_experts": 4, "moe_num_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_k": 2},
    **{"moe_topk": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16, "shared_intermediate_size": 16},
}
LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "v_head_dim": 8,
}
"""Sizes of models whose keys and values come from fewer numbers, for each head."""


def small_model(family, attention=None) -> PreTrainedModel:
    torch.manual_seed(0)
    defaults = AutoConfig.for_model(family)
    known = vars(defaults).keys() | type(defaults).attribute_map.keys()
    sizes = SMALL | (LATENT if "kv_lora_rank" in known else {})
    config = AutoConfig.for_model(family, **{name: value for name, value in sizes.items() if name in known})
    if attention:
        config._attn_implementation = attention
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # zeros and ones would hide what a model looks at
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, None) for family in sorted(PACKING_FAMILIES)] + [("gpt2", "eager"), ("llama", "eager")],
)
@torch.no_grad()
def test_a_document_in_a_block_has_the_logits_that_it_has_alone(family, attention):
    model = small_model(family, attention)
    documents = [np.random.default_rng(index).integers(2, 64, size) for index, size in enumerate((3, 5, 7, 4))]
    batch = next(iter(DataLoader(Blocks(TokenDocuments(in_memory(documents)), 10, True, PAD), batch_size=2)))
    packed = model(**batch, use_cache=False).logits.flatten(0, 1)
    # The third document reaches into the second block, which sees no more of it than it holds.
    pieces = [documents[0], documents[1], documents[2][:2], documents[2][2:], documents[3]]
    alone = torch.cat([model(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits[0] for ids in pieces])
    torch.testing.assert_close(packed[: len(alone)], alone, rtol=1e-4, atol=2e-6)


@torch.no_grad()
def test_opt_is_no_such_family():
    assert "opt" not in PACKING_FAMILIES
    model = small_model("opt")
    ids, positions = torch.arange(2, 10)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = model(input_ids=ids[:, 4:], position_ids=positions[:, 4:], use_cache=False).logits
    assert not torch.allclose(packed[:, 4:], alone, atol=1e-4)
