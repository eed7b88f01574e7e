"""Whether the hub answers is asked once, of a server on this machine in its place."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from torchacc.cli.main import main
from torchacc.errors import ConfigError
from torchacc.train.file import TrainFile
from torchacc.train.hub import check_hub, is_on_hub
from torchacc.train.stage import StageRequest, resolve_stage

STAGE = "training_stages:\n  one:\n    distributed: {engine: native}\n    "


class Hub(BaseHTTPRequestHandler):
    """Answers that there is nothing, as a mirror may at its root."""

    def do_HEAD(self):
        self.server.asked.append(self.path)
        self.send_response(404)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A hub that answers, and notes what it was asked."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked = []
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def no_hub(monkeypatch):
    """A hub that does not answer."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        port = server.server_port
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def resolve(tmp_path, stage, model="{model_type: gpt2, n_layer: 1}", launch=None):
    path = tmp_path / "config.yaml"
    path.write_text(f"output_dir: {tmp_path}/out\n{STAGE}{stage}\nmodel_config_m: {model}\n", encoding="utf-8")
    return resolve_stage(TrainFile.read(path), StageRequest(), launch)


PRETRAINED = "{pretrained: someone/model}"
NAMED = {
    "data: {dataset: someone/text}": "config.yaml:5: training_stages.one.data.dataset = 'someone/text'",
    "data: {tokenizer: gpt2}": "config.yaml:5: training_stages.one.data.tokenizer = 'gpt2'",
    "init_from: someone/model": "config.yaml:5: training_stages.one.init_from = 'someone/model'",
    "data: {}": "config.yaml:6: model_config_m.pretrained = 'someone/model'",
}


@pytest.mark.parametrize(("stage", "message"), NAMED.items(), ids=str)
def test_a_hub_that_does_not_answer_is_told_with_the_option_that_asks_for_it(no_hub, tmp_path, stage, message):
    model = {"model": PRETRAINED} if stage == "data: {}" else {}
    with pytest.raises(ConfigError) as raised:
        resolve(tmp_path, stage, **model)
    assert f"{message}: there is no such folder, and the Hugging Face hub does not answer at http://127" in str(
        raised.value
    )
    assert "name a folder, or set HF_HUB_OFFLINE=1 to use what was downloaded before" in str(raised.value)


def test_a_hub_that_answers_is_asked_once(hub, tmp_path):
    run = resolve(tmp_path, "data: {dataset: someone/text, tokenizer: gpt2}", PRETRAINED)
    assert run.model["pretrained"] == "someone/model"
    assert hub.asked == ["/"]


def test_who_needs_no_hub_does_not_ask(hub, tmp_path, monkeypatch):
    resolve(tmp_path, "data: {dataset: stdlib}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    resolve(tmp_path, "data: {tokenizer: gpt2}")
    assert not hub.asked


def test_a_plan_tells_it_too(no_hub, capsys, monkeypatch):
    for name, value in {"PJRT_SELECT_DEFAULT_DEVICE": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["plan", "--model", "gpt2"]) == 2
    assert "error: --model = 'gpt2': there is no such folder, and the Hugging Face hub" in capsys.readouterr().err


def test_what_can_be_a_folder_alone_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert not any(map(is_on_hub, ["gpt2", "./none", "~/none", "a/b/c"]))
    assert is_on_hub("someone/model")


def test_no_time_to_answer_is_no_answer(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.05)
    monkeypatch.setattr(Hub, "do_HEAD", lambda self: threading.Event().wait(0.5))
    with pytest.raises(ConfigError, match="does not answer"):
        check_hub("data.tokenizer", "gpt2")
