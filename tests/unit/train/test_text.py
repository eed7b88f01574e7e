import contextlib
import gzip
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, GPT2Config, LlamaConfig, OPTConfig

from tests import forkrun
from torchacc.errors import ConfigError, DataError
from torchacc.parallel.sequence_split import IGNORE_INDEX
from torchacc.train.config import TextConfig
from torchacc.train.corpus import stdlib_documents, stdlib_files
from torchacc.train.documents import DocumentSource, check_text, find_sources
from torchacc.train.text import check_model, load_text
from torchacc.train.tokens import train_tokenizer

DOCUMENTS = [
    f"{word} has {index} letters and {'more ' * (index % 7)}" for index, word in enumerate(["one", "two"] * 30)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(DOCUMENTS, 300).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def configure(tmp_path, tokenizer):
    """Make a configuration that reads DOCUMENTS from a JSON file."""
    write_json(tmp_path / "text.jsonl", DOCUMENTS)

    def make(**options):
        defaults = {"dataset": "json", "files": str(tmp_path / "text.jsonl"), "tokenizer": tokenizer, "block_size": 16}
        return TextConfig(**{**defaults, "cache_dir": str(tmp_path / "cache"), **options})

    return make


def write_json(path, documents, column="text"):
    path.write_text("".join(json.dumps({"id": 7, column: document}) + "\n" for document in documents))


def cached(config):
    """Return the files and folders of what was tokenised, and of tokenizers that were trained."""
    found = Path(config.cache_dir).glob("tok*")
    return {path.name: path.stat().st_mtime_ns for path in found if path.suffix != ".lock"}


def documents_of(examples, tokenizer):
    """Return the documents that examples hold, put together again."""
    tokens = [
        token
        for block in examples
        for token, position, label in zip(
            *(block[k].tolist() for k in ("input_ids", "position_ids", "labels")), strict=True
        )
        if label != IGNORE_INDEX or position == 0
    ]
    # What is padded ends texts, too.
    return [text for text in tokenizer.decode(tokens).split(tokenizer.eos_token) if text]


def test_a_share_of_the_documents_is_held_out(configure):
    data = load_text(configure(), seed=0)
    held_out = DOCUMENTS[19::20]
    assert documents_of(data.validation, data.tokenizer) == held_out
    assert documents_of(data.train, data.tokenizer) == [text for text in DOCUMENTS if text not in held_out]
    assert len(data.train.documents) == 57
    num_tokens = sum((block["input_ids"] != 0).sum() for block in data.train) + 57  # 0 ends a document
    assert data.train.documents.starts[-1] == num_tokens
    batch = next(iter(DataLoader(data.train, batch_size=4)))
    assert {name: tuple(values.shape) for name, values in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (4, 16)
    )


def test_kinds_of_files_give_the_same_tokens(configure, tmp_path):
    (tmp_path / "text").mkdir()
    for index, document in enumerate(DOCUMENTS):
        (tmp_path / "text" / f"{index:02}.txt").write_text(document)
    Dataset.from_dict({"text": DOCUMENTS}).to_parquet(tmp_path / "text.parquet")
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress((tmp_path / "text.jsonl").read_bytes()))
    expected = load_text(configure(), seed=0)
    (tmp_path / "te[x]t.jsonl").write_bytes((tmp_path / "text.jsonl").read_bytes())
    named = [("text", "text/*.txt"), ("parquet", "text.parquet"), ("json", "text.jsonl.gz"), ("json", "te[x]t.jsonl")]
    for kind, files in named:
        data = load_text(configure(dataset=kind, files=str(tmp_path / files)), seed=0)
        for name in ("train", "validation"):
            blocks, others = getattr(data, name), getattr(expected, name)
            assert [block["input_ids"].tolist() for block in blocks] == [
                block["input_ids"].tolist() for block in others
            ]


def test_a_dataset_in_a_folder_has_its_own_splits(configure, tmp_path):
    (tmp_path / "dataset").mkdir()
    write_json(tmp_path / "dataset" / "train.jsonl", DOCUMENTS[:9])
    write_json(tmp_path / "dataset" / "test.jsonl", DOCUMENTS[9:12])
    config = configure(dataset=str(tmp_path / "dataset"), files=None, validation={"split": "test"})
    data = load_text(config, seed=0)
    assert documents_of(data.train, data.tokenizer) == DOCUMENTS[:9]
    assert documents_of(data.validation, data.tokenizer) == DOCUMENTS[9:12]
    first = cached(config)
    load_text(config, seed=0)
    assert cached(config) == first
    write_json(tmp_path / "dataset" / "test.jsonl", DOCUMENTS[12:15])
    assert documents_of(load_text(config, seed=0).validation, data.tokenizer) == DOCUMENTS[12:15]
    with pytest.raises(DataError, match="dataset.no': there is no such folder"):
        load_text(configure(dataset=str(tmp_path / "dataset.no"), files=None), seed=0)
    with pytest.raises(DataError, match=r"split 'none' of .* cannot be read: Unknown split \"none\""):
        load_text(configure(dataset=str(tmp_path / "dataset"), files=None, validation={"split": "none"}), seed=0)


def test_validation_files_of_ones_own(configure, tmp_path):
    write_json(tmp_path / "other.jsonl", ["another text"])
    data = load_text(configure(validation={"files": str(tmp_path / "other.jsonl")}), seed=0)
    assert documents_of(data.validation, data.tokenizer) == ["another text"]
    assert len(data.train.documents) == len(DOCUMENTS)


def test_a_document_that_is_alone_is_cut(configure, tmp_path):
    (tmp_path / "one.txt").write_text(" ".join(DOCUMENTS))
    data = load_text(configure(dataset="text", files=str(tmp_path / "one.txt"), validation_share=0.25), seed=0)
    (begin,), (end,) = (documents_of(part, data.tokenizer) for part in (data.train, data.validation))
    assert begin + end == " ".join(DOCUMENTS)
    assert data.validation.documents.starts[-1] == pytest.approx(data.train.documents.starts[-1] / 3, abs=1)


def test_few_documents_leave_one_to_validate_on(configure, tmp_path):
    write_json(tmp_path / "few.jsonl", ["one", "", "two", "three", ""])
    data = load_text(configure(files=str(tmp_path / "few.jsonl")), seed=0)
    assert documents_of(data.train, data.tokenizer) == ["one", "two"]
    assert documents_of(data.validation, data.tokenizer) == ["three"]
    assert load_text(configure(files=str(tmp_path / "few.jsonl"), validation_share=0.0), seed=0).validation is None


def test_a_tokenizer_is_trained_on_what_is_learnt_from(configure, tmp_path):
    documents = ["abcabc abc"] * 19 + ["xyzxyz xyz"]
    write_json(tmp_path / "letters.jsonl", documents)
    data = load_text(configure(files=str(tmp_path / "letters.jsonl"), tokenizer=None, vocab_size=260), seed=0)
    assert len(data.tokenizer) == 260
    assert "abc" in data.tokenizer.get_vocab()
    assert "xy" not in data.tokenizer.get_vocab()
    assert documents_of(data.validation, data.tokenizer) == ["xyzxyz xyz"]


def test_several_processes_tokenise_alike(configure):
    expected = load_text(configure(), seed=0).train[3]
    found = load_text(configure(num_proc=2, cache_dir=configure().cache_dir + "2"), seed=0).train[3]
    assert found["input_ids"].tolist() == expected["input_ids"].tolist()


def test_what_matters_decides_whether_the_cache_is_used(configure, tmp_path):
    config = configure()
    load_text(config, seed=0)
    first = cached(config)
    for same in (configure(), configure(block_size=32, packing=False, shuffle=False), configure(num_proc=1)):
        load_text(same, seed=1)
        assert cached(config) == first
    load_text(configure(validation_share=0.1), seed=0)
    assert cached(config) == first
    path = tmp_path / "text.jsonl"
    for documents, as_old in ((DOCUMENTS[::-1], False), (DOCUMENTS[1:], True)):  # the first is as long as before
        number, before = len(cached(config)), path.stat()
        write_json(path, documents)
        if as_old:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        load_text(configure(), seed=0)
        assert len(cached(config)) == number + 1
    for number, vocab_size in enumerate((270, 280), start=1):
        load_text(configure(tokenizer=None, vocab_size=vocab_size), seed=0)
        assert len(cached(config)) == 3 + 2 * number, "a tokenizer and its tokens"
    assert first.items() <= cached(config).items()


def test_a_text_that_changes_while_it_is_read_is_refused(configure, tmp_path, monkeypatch):
    own = DocumentSource.load

    def load(self, cache_dir):
        with (tmp_path / "text.jsonl").open("a") as file:
            file.write('{"text": "more"}\n')
        return own(self, cache_dir)

    monkeypatch.setattr(DocumentSource, "load", load)
    with pytest.raises(DataError, match=r"text.jsonl has changed while it was read"):
        load_text(configure(), seed=0)
    monkeypatch.undo()
    assert len(load_text(configure(), seed=0).train.documents) == 58


def cut_short(path):
    """Leave of an Arrow file what lies before its last batch, as one that reads without an error."""
    with pa.memory_map(str(path)) as file:
        reader, cuts = pa.ipc.open_stream(file), [0]
        with contextlib.suppress(StopIteration):
            while True:
                reader.read_next_batch()
                cuts.append(file.tell())
    shorter = path.with_suffix(".new")
    shorter.write_bytes(path.read_bytes()[: cuts[-2]])
    shorter.replace(path)  # what is mapped stays


def test_what_is_cut_short_is_not_trained_on(configure, tmp_path, caplog):
    write_json(tmp_path / "many.jsonl", DOCUMENTS * 10)
    config = configure(files=str(tmp_path / "many.jsonl"), validation_share=0.0)
    assert len(load_text(config, seed=0).train.documents) == 600
    (tokens,) = Path(config.cache_dir).glob("tokens-*.arrow")
    cut_short(tokens)
    assert 0 < len(Dataset.from_file(str(tokens))) < 600
    assert len(load_text(config, seed=0).train.documents) == 600
    assert f"{tokens} is truncated" in caplog.text
    (documents,) = Path(config.cache_dir).glob("json/**/*.arrow")
    documents.write_bytes(documents.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"many.jsonl is kept in .*, which is truncated: remove .*/json/"):
        load_text(config, seed=0)


@pytest.fixture
def start(configure, tmp_path):
    """Start processes that load a text which takes a while to tokenise."""
    write_json(tmp_path / "long.jsonl", [" ".join(DOCUMENTS)] * 400)
    config = configure(files=str(tmp_path / "long.jsonl"))

    def make():
        return subprocess.Popen(
            [
                forkrun.python("torch_xla"),
                Path(__file__).with_name("text_program.py"),
                json.dumps(config.model_dump()),
            ],
            env=forkrun.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return config, make


@pytest.mark.slow
def test_one_of_several_processes_tokenises_also_after_one_was_killed(start):
    config, make = start
    killed = make()
    cache = Path(config.cache_dir)
    while killed.poll() is None and not list(cache.glob("tmp*")):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not cached(config)

    processes = [make(), make()]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (found,) = {stdout for stdout, _ in outputs}
    assert json.loads(found.splitlines()[1])[0] == 380
    assert sorted(stderr.count("tokenising /") for _, stderr in outputs) == [0, 1]
    assert sorted("examples/s" in stderr for _, stderr in outputs) == [False, True]
    assert [Path(name).suffix for name in cached(config)] == [".arrow"]


def test_a_stream_has_the_documents_of_the_text(configure, tmp_path):
    write_json(tmp_path / "text.jsonl", [text for document in DOCUMENTS for text in (document, "")])
    data = load_text(configure(), seed=0)
    stream = load_text(configure(streaming=True, shuffle=False), seed=0)
    for name in ("train", "validation"):
        blocks, others = getattr(stream, name), getattr(data, name)
        assert [block["labels"].tolist() for block in blocks] == [block["labels"].tolist() for block in others]
    assert not Path(configure(streaming=True, cache_dir="none").cache_dir).exists()


def test_each_epoch_of_a_stream_has_an_order_of_its_own(configure):
    def orders(seed):
        data = load_text(configure(streaming=True), seed=seed)
        return [documents_of(data.train, data.tokenizer) for _ in range(2)]

    first, second = orders(0)
    assert orders(0) == [first, second]
    assert first not in (second, orders(1)[0], sorted(first))
    assert sorted(first) == sorted(second)


def test_the_standard_library(tmp_path):
    files = stdlib_files()
    assert {"argparse.py", "heapq.py"} < {path.name for path in files}
    assert not any("test" in path.parts or "site-packages" in path.parts for path in files)
    (source,) = find_sources(TextConfig(text_column="code"))
    documents = source.load(tmp_path)["text"][:]
    assert documents[files.index(Path(os.__file__))] == Path(os.__file__).read_text()
    assert documents == stdlib_documents()


BAD = {
    "files = 'none.jsonl': there is no such file": {"files": "none.jsonl"},
    "validation.files = 'none': there is no such file": {"validation": {"files": "none"}},
    "files = '.': it is a folder": {"files": "."},
    "it reads files": {"files": None},
    "empty.jsonl is empty": {"files": "empty.jsonl"},
    "no such column, but 'id', 'text'": {"text_column": "body"},
    "'id': it holds int, not text": {"text_column": "id"},
    "broken.jsonl cannot be read: JSON parse error": {"files": "broken.jsonl"},
    "latin.txt cannot be read: 'utf-8' codec": {"dataset": "text", "files": "latin.txt"},
    "blank.jsonl has no text in its column 'text'": {"files": "blank.jsonl", "validation_share": 0.0},
    "holds int, not text, in row 3 of": {"files": "mixed.jsonl"},
    "cache_dir: empty.jsonl cannot be made": {"cache_dir": "empty.jsonl"},
    "files go with dataset: text, json, parquet, not 'stdlib'": {"dataset": "stdlib"},
    "text.jsonl is trained on": {"validation": {"files": "tex*.jsonl"}},
    "give one of split and files": {"validation": {}},
    "files have no splits": {"validation": {"split": "test"}},
    "files have no configurations": {"name": "small"},
    "no tokenizer can be trained on text that is streamed": {"streaming": True, "tokenizer": None},
    "tokenizer = './none': there is no such folder": {"tokenizer": "./none"},
    "tokenizer = './endless': it has no end-of-text token": {"tokenizer": "./endless"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(configure, tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    write_json(Path("blank.jsonl"), ["", ""])
    write_json(Path("mixed.jsonl"), [None, "one", 5])
    Path("broken.jsonl").write_text('{"text": "one"\nno')
    Path("latin.txt").write_bytes("für".encode("latin1"))
    endless = train_tokenizer(DOCUMENTS, 300)
    endless.eos_token = None
    endless.save_pretrained("endless")
    with pytest.raises(DataError) as caught:
        load_text(configure(**BAD[message]), seed=0)
    assert message in str(caught.value)
    assert not cached(configure()) or "blank" in message, "no row of it is text"
    if not any(late in message for late in ("blank", "row")):  # it takes reading all
        with pytest.raises(DataError) as early:
            check_text(configure(**BAD[message]))
        assert str(early.value) == str(caught.value)


def test_a_row_without_text_is_refused_in_a_stream(configure, tmp_path):
    write_json(tmp_path / "mixed.jsonl", [None, "one", 5])
    data = load_text(configure(files=str(tmp_path / "mixed.jsonl"), streaming=True), seed=0)
    with pytest.raises(DataError, match=r"holds int, not text, in row 3 of .*mixed.jsonl: 5"):
        list(data.train)


def test_a_cache_that_cannot_be_made_is_refused(configure):
    with pytest.raises(DataError, match=r"data.cache_dir: /proc/none cannot be written"):
        load_text(configure(cache_dir="/proc/none"), seed=0)


def test_a_model_that_does_not_fit_is_refused(configure):
    config = configure(block_size=64)
    check_model(config, GPT2Config(n_positions=64, use_cache=False))
    check_model(configure(block_size=64, packing="concat"), OPTConfig(use_cache=True))
    check_model(configure(block_size=64, packing=False), GPT2Config(n_positions=64))
    with pytest.raises(ConfigError, match="block_size = 64: the model has 32 positions; write block_size: 32 or less"):
        check_model(config, GPT2Config(n_positions=32, use_cache=False))
    with pytest.raises(ConfigError, match="opt is not known to keep to one document"):
        check_model(config, OPTConfig(use_cache=False))
    with pytest.raises(ConfigError, match=r"set model.config.use_cache = False"):
        check_model(config, LlamaConfig())
    flash = LlamaConfig(use_cache=False, attn_implementation="flash_attention_2")
    with pytest.raises(ConfigError, match="attention 'flash_attention_2' does not keep"):
        check_model(config, flash)


def test_the_tokenizer_that_was_trained_is_that_of_the_folder(configure):
    data = load_text(configure(tokenizer=None, vocab_size=280), seed=0)
    (folder,) = Path(configure().cache_dir).glob("tokenizer-*/")
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == data.tokenizer.get_vocab()


def test_reading_files_shows_no_download(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("a document")
    (source,) = find_sources(TextConfig(dataset="text", files=str(tmp_path / "one.txt")))
    source.load(tmp_path / "cache")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
