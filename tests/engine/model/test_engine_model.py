"""Loading: models that are accepted or refused, and how the prompt is cut."""

from functools import partial
from pathlib import Path
from subprocess import CalledProcessError

import pytest
import torch

from daemon.cli.check import _model
from daemon.config.schema import UNTRAINED, Config, ModelConfig, SessionConfig
from daemon.engine.build import load
from engine.device import resolve_device, unused_gpu
from engine.model import canary
from engine.model.architectures import ModelError
from engine.model.chat_format import PromptError, PromptFormat
from engine.model.embedded import build_tokenizer, embedded_directory
from engine.model.loading import load_model
from feeds.connector import SettingError
from tests.engine.oracle import tiny
from tests.kit import tolerance


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_directory(tmp_path_factory.mktemp("cache"))


def test_the_embedded_model_is_the_same_every_time(directory: Path, tmp_path: Path) -> None:
    """Two builds in two places have the same weights, tokens and revision, and say untrained."""
    again = embedded_directory(tmp_path)
    one, two = (load_model(each, layers="torch") for each in (directory, again))
    assert one.revision == two.revision
    assert one.untrained
    assert two.untrained
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert canary.check(one) < tolerance.of_model(one)
    assert embedded_directory(tmp_path) == again  # the second time it is only found


def test_the_embedded_tokenizer_reads_back_any_text() -> None:
    tokenizer = build_tokenizer()
    text = "143000,61837.63,61840.00,61830.12,61835.25,12.512\nIs the trend up or down? é☂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    digits = tokenizer.convert_ids_to_tokens(tokenizer.encode("061837", add_special_tokens=False))
    assert digits == ["061", "837"]
    assert len(tokenizer) == 2048
    with pytest.raises(ValueError, match="vocabulary needs"):
        build_tokenizer(300)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no config"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)


def test_a_tokenizer_of_a_larger_embedding_is_refused(directory: Path, tmp_path: Path) -> None:
    """Its tokens would be rows that are not there. An added token may be, unless the template writes it."""
    small = embedded_directory(tmp_path, vocabulary=1792)
    build_tokenizer(2048).save_pretrained(small)
    with pytest.raises(ModelError, match="tokenizer has 2,048 tokens"):
        load_model(small)
    tokenizer = build_tokenizer(1792)
    tokenizer.add_tokens(["<image>", "<turn>"])
    tokenizer.save_pretrained(small)
    assert load_model(small, layers="torch").sizes.vocabulary == 1792
    tokenizer.chat_template = "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(small)
    with pytest.raises(ModelError, match="template writes"):
        load_model(small)


@pytest.mark.parametrize(
    ("template", "why"),
    [("{{ raise_exception('no') }}", "refuses these messages: no"), ("{% if %}", "refuses")],
)
def test_a_chat_template_that_raises_is_refused_at_start(template: str, why: str, tmp_path: Path) -> None:
    small = embedded_directory(tmp_path)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(small)
    with pytest.raises(SettingError, match=why) as caught:
        load(Config(model=ModelConfig(path=str(small))))
    assert caught.value.key == "model.path"


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="GPU"):
            resolve_device("cuda")
    assert resolve_device("cpu") == "cpu"


def a_gpu(directory: Path, monkeypatch: pytest.MonkeyPatch, *, usable: bool = False) -> Path:
    """What the driver of a GPU that torch cannot use has in ``directory``."""
    (directory / "nvidia0").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return directory


def test_a_gpu_that_auto_leaves_unused_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = a_gpu(tmp_path, monkeypatch)
    found = unused_gpu("auto", devices)
    assert found is not None
    assert "built without CUDA: install one" in found
    assert unused_gpu("cpu", devices) is None
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert unused_gpu("auto", devices) is None
    a_gpu(tmp_path, monkeypatch, usable=True)
    assert unused_gpu("auto", devices) is None
    (devices / "nvidia0").rename(devices / "nvidiactl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert unused_gpu("auto", devices) is None


def test_a_start_and_a_check_warn_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    why = "auto takes the CPU though"
    for module in ("daemon.engine.build", "daemon.cli.check"):
        monkeypatch.setattr(f"{module}.unused_gpu", partial(unused_gpu, files=a_gpu(tmp_path, monkeypatch)))
    config = Config(
        model=ModelConfig(path=UNTRAINED), sessions=(SessionConfig("aaa", "V:AAA"),), standing="none"
    )
    found = [each for each in _model(config, 1) if each.key == "model.device"]
    assert [each.ok for each in found] == [True]
    assert found[0].message.startswith(f"warning: {why}")
    assert f"model.device: {why}" in caplog.text


@pytest.mark.parametrize(
    ("built_for", "raised", "why"),
    [
        (None, None, "built without CUDA: install"),
        (
            "13.0",
            RuntimeError("The NVIDIA driver on your system is too old.\nMore."),
            "too old: .*for CUDA 13.0",
        ),
        ("13.0", None, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_why_there_is_no_gpu_is_said(
    built_for: str | None, raised: Exception | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        if raised is not None:
            raise raised

    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=f"no GPU is visible: .*{why}"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("raised", "why"),
    [
        (CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), "install gcc and the headers of this Python"),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "install gcc and the headers"),
        (PermissionError(13, "Permission denied", "/root/.triton"), "/root/.triton.*TRITON_CACHE_DIR"),
        (RuntimeError("shapes do not match"), "does not run over regions: shapes"),
    ],
)
def test_what_kernels_lack_to_be_compiled_is_said_before_the_engine_is_ready(
    raised: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> None:
        raise raised

    monkeypatch.setattr(canary, "_over_regions", run)
    with pytest.raises(ModelError, match=why):
        canary.check(tiny("llama"), torch.empty(0))


def test_the_prompt_is_cut_at_tape_and_question() -> None:
    tokenizer = build_tokenizer()
    prompt = PromptFormat.of(tokenizer, "Be brief.")
    whole = list(prompt.frozen()) + prompt.encode("TAPE\n") + prompt.question("Why?")
    text = tokenizer.decode(whole)
    assert text.index("Be brief.") < text.index("TAPE") < text.index("Why?")
    assert text.endswith("<|assistant|>")
    assert prompt.decode(prompt.encode(" 42") + list(prompt.stop_ids)) == "42"
    assert prompt.choice("UP") != prompt.choice("DOWN")
    with pytest.raises(ValueError, match="empty choice"):
        prompt.choice(" ")


def test_the_ready_position_is_the_header_of_an_answer_without_a_question() -> None:
    tokenizer = build_tokenizer()
    prompt = PromptFormat.of(tokenizer)
    question, ready = tokenizer.decode(prompt.question("Why?")), tokenizer.decode(prompt.ready())
    assert question == "\nQuestion: Why?" + ready
    assert ready.endswith("<|assistant|>")


def test_a_template_without_a_system_role_gets_it_in_the_user_turn() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
        "{% endif %}[{{ m['content'] }}]{% endfor %}"
    )
    prompt = PromptFormat.of(tokenizer, "Be brief.")
    assert tokenizer.decode(list(prompt.frozen())).startswith("[Be brief.")
    tokenizer.chat_template = "nothing of it"
    with pytest.raises(PromptError, match="exactly once"):
        PromptFormat.of(tokenizer)


def test_a_tokenizer_without_a_template_gets_plain_text() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    prompt = PromptFormat.of(tokenizer)
    assert prompt.after_question == "\nAnswer:"
    assert prompt.choice("UP") == prompt.encode(" UP")[0]
